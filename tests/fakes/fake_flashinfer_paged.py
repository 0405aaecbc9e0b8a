"""What FlashInfer's paged wrappers have in common: buffers, schedule, checks and the kernel.

A plan is staged in pinned memory and copied on the stream, as in FlashInfer; running compares the
lengths in the device buffers with the schedule, so a plan that was forgotten is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fakes.fake_paged import (
    Mask,
    attend,
    read_pages,
    require,
    require_i32,
    require_no_overlap,
)
from tests.fakes.fake_stream import STREAM

INT_WORKSPACE_BYTES = 1 << 16  # 8 MiB in FlashInfer; smaller here, the tests make many wrappers


@dataclass(frozen=True, slots=True)
class Planned:
    """What the last plan was called with."""

    num_reqs: int
    num_rows: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    mask: Mask


def as_dtype(value: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, value) if isinstance(value, str) else value
    assert isinstance(found, torch.dtype)
    return found


def check_lists(indptr: Tensor, indices: Tensor, last: Tensor, page_size: int) -> Tensor:
    """Check the page lists of a plan and return the lengths."""
    for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last)):
        require_i32(tensor, name)
    require(len(indptr) == len(last) + 1, "indptr has one entry more than last_page_len")
    require(int(indptr[0]) == 0, "indptr must begin with 0")
    counts = indptr.diff()
    require(bool((counts >= 0).all()), "indptr must not decrease")
    require(int(indptr[-1]) <= len(indices), "indptr reaches past indices")
    is_in_page = bool(((last >= 1) & (last <= page_size)).all())
    require(is_in_page, f"last_page_len must be 1 to {page_size}")
    return (counts - 1).clamp(min=0) * page_size + last


class PagedWrapper:
    """Base of both wrappers."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str, is_graph: bool) -> None:
        require(kv_layout in ("NHD", "HND"), f"invalid kv_layout {kv_layout}", KeyError)
        require(backend in ("auto", "fa2", "fa3", "trtllm-gen"), f"unknown backend {backend}")
        require(workspace.dtype == torch.uint8, "the workspace is uint8")
        require(workspace.data_ptr() % 16 == 0, "the workspace must be 16-byte aligned")
        require(not bool(workspace[:4096].any()), "the workspace must be zero before its first use")
        self.device = workspace.device
        self._kv_layout, self._backend, self._use_cuda_graph = kv_layout, backend, is_graph
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8)
        self._pinned = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8)
        self._plan_info: list[int] | None = None
        self._planned: Planned | None = None
        self._qo_indptr_buf: Tensor | None = None
        self._paged_kv_indptr_buf: Tensor | None = None
        self._paged_kv_indices_buf: Tensor | None = None
        self._paged_kv_last_page_len_buf: Tensor | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace: Tensor) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace
        self._pinned = torch.empty_like(int_workspace)

    def _check_graph_sizes(self, indices: Tensor, num_reqs: int, fixed: int) -> None:
        buffer = self._paged_kv_indices_buf
        assert buffer is not None
        require(num_reqs == fixed, f"the batch size should be fixed: {num_reqs} against {fixed}")
        require(len(indices) <= len(buffer), "indices do not fit the allocated buffer")

    def _set_buffer(self, name: str, source: Tensor) -> None:
        """Copy a list from the host: into the fixed buffer of a graph, else into a new one."""
        fixed: Tensor | None = getattr(self, name)
        if not self._use_cuda_graph or fixed is None:
            fixed = torch.empty_like(source)
            setattr(self, name, fixed)
        STREAM.copy(fixed[: len(source)], source)

    def _set_indices(self, source: Tensor) -> None:
        """Take the page numbers, which are on the device already."""
        fixed = self._paged_kv_indices_buf
        if not self._use_cuda_graph or fixed is None:
            self._paged_kv_indices_buf = source
            return
        target = fixed[: len(source)]

        def copy() -> None:
            target.copy_(source)

        STREAM.submit(copy)

    def _schedule(self, planned: Planned, lengths: Tensor) -> None:
        """Write the schedule to pinned memory and submit its copy."""
        staged = self._pinned.view(torch.int32)[: len(lengths) + 1]
        staged[0] = len(lengths)
        staged[1:] = lengths
        STREAM.copy(self._int_workspace_buffer.view(torch.int32)[: len(staged)], staged)
        self._planned = planned
        self._plan_info = [planned.num_reqs, planned.num_rows, planned.num_qo_heads]

    def _launch(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        out: Tensor | None,
        window_left: int | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        planned = self._planned
        require(planned is not None, "plan was not called", AttributeError)
        assert planned is not None
        assert window_left in (None, planned.mask.window_left), "window_left differs from plan"
        k_cache, v_cache = self._unpack(paged_kv_cache)
        self._check_run(q, k_cache, v_cache, planned)
        result = torch.full(q.shape, float("nan"), dtype=planned.o_dtype) if out is None else out
        require(result.shape == q.shape, "out has the wrong shape")
        require(result.dtype == planned.o_dtype, "out has the wrong dtype")
        require_no_overlap(result, (q, k_cache, v_cache))
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        # What a kernel is launched with: pointers, not what the wrapper holds when it runs.
        lists = (
            self._qo_indptr_buf,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
        )
        schedule = self._int_workspace_buffer

        def kernel() -> None:
            self._kernel(q, (k_cache, v_cache), result, lse, planned, lists, schedule, sinks)

        STREAM.submit(kernel)
        return result, lse

    def _kernel(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        planned: Planned,
        lists: tuple[Tensor | None, ...],
        schedule: Tensor,
        sinks: Tensor | None,
    ) -> None:
        _, indptr, indices, last = lists
        assert indptr is not None
        assert indices is not None
        assert last is not None
        qo_indptr = torch.arange(planned.num_reqs + 1) if lists[0] is None else lists[0]
        lengths = (indptr.diff() - 1).clamp(min=0) * planned.page_size + last
        rows = schedule.view(torch.int32)[: len(lengths) + 1]
        is_planned = int(rows[0]) == len(lengths) and torch.equal(rows[1:], lengths.to(torch.int32))
        require(is_planned, "the schedule is for other lengths: plan again", AssertionError)
        for row, length in enumerate(lengths.tolist()):
            pages = indices[int(indptr[row]) : int(indptr[row + 1])]
            k, v = (read_pages(cache, pages, length) for cache in caches)
            part = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            row_out, row_lse = attend(q[part], k, v, planned.mask, sinks)
            out[part] = row_out.to(out.dtype)
            lse[part] = row_lse / math.log(2)

    def _unpack(self, cache: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pair = cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, 1])
        if self._kv_layout == "HND":
            return pair[0].transpose(1, 2), pair[1].transpose(1, 2)
        return pair

    def _check_run(self, q: Tensor, k: Tensor, v: Tensor, planned: Planned) -> None:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            require(tensor.device == self.device, f"{name} must be on {self.device}")
            require(tensor.stride(-1) == 1, f"the last dimension of {name} must be contiguous")
        rows = (planned.num_rows, planned.num_qo_heads, planned.head_dim)
        require(tuple(q.shape) == rows, f"q has shape {tuple(q.shape)}, planned were {rows}")
        require(q.dtype == planned.q_dtype, f"q is {q.dtype}, planned was {planned.q_dtype}")
        require(k.dtype == planned.kv_dtype, f"k is {k.dtype}, planned was {planned.kv_dtype}")
        require(k.stride() == v.stride(), "k and v strides differ", RuntimeError)
        page = (planned.page_size, planned.num_kv_heads, planned.head_dim)
        require(tuple(k.shape[1:]) == page, f"pages are {tuple(k.shape[1:])}, planned were {page}")
