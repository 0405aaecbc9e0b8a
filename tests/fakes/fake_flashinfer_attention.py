"""FlashInfer's paged attention wrappers as of 0.6.4: their signatures and refusals, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fakes.fake_flashinfer_paged import PagedWrapper, Planned, as_dtype, check_lists
from tests.fakes.fake_paged import Mask, default_scale, require, require_i32
from tests.fakes.fake_stream import STREAM

# What 0.6.4 dispatches; later versions add 6 and 16.
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
HEAD_DIMS = (64, 128, 256, 512)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One query token per request."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        del jit_args
        self._use_tensor_cores = use_tensor_cores
        self._fixed_batch_size = 0
        if use_cuda_graph:
            buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            for buffer in buffers:
                require(isinstance(buffer, Tensor), "graph mode needs three buffers")
                assert buffer is not None
                require_i32(buffer, "a buffer", self.device)
            assert paged_kv_last_page_len_buffer is not None
            assert paged_kv_indptr_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            is_fitting = len(paged_kv_indptr_buffer) == self._fixed_batch_size + 1
            require(is_fitting, "paged_kv_indptr_buffer should have batch_size + 1 entries")
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        del rope_scale, rope_theta, non_blocking, block_tables, seq_lens, disable_split_kv
        require(pos_encoding_mode == "NONE", "the fake rotates nothing", NotImplementedError)
        if self._use_cuda_graph:
            self._check_graph_sizes(indices, len(last_page_len), self._fixed_batch_size)
        lengths = check_lists(indptr, indices, last_page_len, page_size)
        require(indices.device == self.device, "indices must be on the device")
        self._check_kernel(num_qo_heads, num_kv_heads, head_dim, fixed_split_size)
        self._set_buffer("_paged_kv_indptr_buf", indptr)
        self._set_indices(indices)
        self._set_buffer("_paged_kv_last_page_len_buf", last_page_len)
        q_dtype = as_dtype(q_data_type)
        mask = Mask(
            default_scale(sm_scale, head_dim),
            is_causal=False,
            window_left=window_left,
            soft_cap=logits_soft_cap or 0.0,
        )
        self._schedule(
            Planned(
                num_reqs=len(last_page_len),
                num_rows=len(last_page_len),
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                q_dtype=q_dtype,
                kv_dtype=as_dtype(kv_data_type or data_type or q_dtype),
                o_dtype=as_dtype(o_data_type or q_dtype),
                mask=mask,
            ),
            lengths,
        )

    def _check_kernel(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, fixed_split_size: int | None
    ) -> None:
        require(num_qo_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads")
        require(head_dim in HEAD_DIMS, f"unsupported head_dim {head_dim}", RuntimeError)
        if not self._use_tensor_cores:
            require(fixed_split_size is None, "fixed_split_size needs tensor cores")
            group = num_qo_heads // num_kv_heads
            is_served = group in CUDA_CORE_GROUPS
            require(is_served, f"unsupported group_size: {group}", RuntimeError)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        del args, q_scale, k_scale, v_scale, lse, enable_pdl
        is_plain = q_len_per_req == 1 or self._use_tensor_cores
        require(is_plain, "q_len_per_req above 1 needs tensor cores")
        result, made_lse = self._launch(q, paged_kv_cache, out, window_left, sinks)
        return (result, made_lse) if return_lse else result


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Any number of query tokens per request."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        del custom_mask_buf, mask_indptr_buf, jit_args
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._kv_lens_buffer = torch.empty(32768, dtype=torch.int32)
        self._max_total_num_rows: int | None = None
        if use_cuda_graph:
            buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf)
            has_all = all(isinstance(buffer, Tensor) for buffer in buffers)
            require(has_all, "graph mode needs four buffers")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
        **rest: object,
    ) -> None:
        del use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking, rest
        no_mask = custom_mask is None and packed_custom_mask is None
        is_plain = no_mask and pos_encoding_mode == "NONE" and head_dim_vo in (None, head_dim_qk)
        require(is_plain, "the fake has no custom mask, rope or other head_dim_vo", TypeError)
        require_i32(qo_indptr, "qo_indptr")
        require(int(qo_indptr[0]) == 0, "qo_indptr must begin with 0")
        require(len(qo_indptr) == len(paged_kv_indptr), "both indptr have batch_size + 1 entries")
        lengths = check_lists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        require(paged_kv_indices.device == self.device, "indices must be on the device")
        if seq_lens is not None:  # 0.6.4 plans by them, and believes what it is told
            require_i32(seq_lens, "seq_lens")
            require(torch.equal(seq_lens, lengths), "seq_lens must be those of the page lists")
            STREAM.copy(self._kv_lens_buffer[: len(seq_lens)], seq_lens)
        num_rows = int(qo_indptr[-1])
        if self._use_cuda_graph:
            assert self._qo_indptr_buf is not None
            fixed = len(self._qo_indptr_buf) - 1
            self._check_graph_sizes(paged_kv_indices, len(qo_indptr) - 1, fixed)
            limit = self._max_total_num_rows or num_rows
            self._max_total_num_rows = limit
            require(num_rows <= limit, f"{num_rows} rows exceed the {limit} of the first plan")
        require(num_qo_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads")
        require(head_dim_qk in HEAD_DIMS[:3], f"unsupported head_dim {head_dim_qk}", RuntimeError)
        self._set_buffer("_qo_indptr_buf", qo_indptr)
        self._set_buffer("_paged_kv_indptr_buf", paged_kv_indptr)
        self._set_indices(paged_kv_indices)
        self._set_buffer("_paged_kv_last_page_len_buf", paged_kv_last_page_len)
        q_dtype = as_dtype(q_data_type)
        scale = default_scale(sm_scale, head_dim_qk)
        self._schedule(
            Planned(
                num_reqs=len(qo_indptr) - 1,
                num_rows=num_rows,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim_qk,
                page_size=page_size,
                q_dtype=q_dtype,
                kv_dtype=as_dtype(kv_data_type or q_dtype),
                o_dtype=as_dtype(o_data_type or q_dtype),
                mask=Mask(scale, causal, window_left, logits_soft_cap or 0.0),
            ),
            lengths,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: object,
        out: Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        **rest: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        del args, rest
        result, lse = self._launch(q, paged_kv_cache, out, window_left, sinks)
        return (result, lse) if return_lse else result


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """Make the schedule alone: the caller has filled the device buffers."""
    del pos_encoding_mode, data_type, rope_scale, rope_theta, non_blocking, fixed_split_size
    del disable_split_kv
    require(self._planned is not None, "a full plan must have run once", AttributeError)
    assert self._planned is not None
    require(self._use_cuda_graph, "the fake knows it for graph wrappers", NotImplementedError)
    self._check_graph_sizes(indices, len(last_page_len), self._fixed_batch_size)
    host_indptr = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    lengths = check_lists(host_indptr, indices, last_page_len, page_size)
    self._check_kernel(num_qo_heads, num_kv_heads, head_dim, None)
    q_dtype = as_dtype(q_data_type or "float16")
    planned = Planned(
        num_reqs=len(last_page_len),
        num_rows=len(last_page_len),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=as_dtype(kv_data_type or q_dtype),
        o_dtype=self._planned.o_dtype,
        mask=Mask(
            default_scale(sm_scale, head_dim),
            is_causal=False,
            window_left=window_left,
            soft_cap=logits_soft_cap or 0.0,
        ),
    )
    self._schedule(planned, lengths)
