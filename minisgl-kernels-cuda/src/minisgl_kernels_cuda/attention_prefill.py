"""Prefill attention of Hopper: how ``attention_prefill.cu`` is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.core import Batch
from minisgl.errors import PluginError
from minisgl_kernels_cuda.attention_plan import LOG2_E, aligned_queries
from minisgl_kernels_cuda.plugin import MAX_PREFILL_RATIO
from minisgl_kernels_cuda.units import ATTENTION_PREFILL, DeviceSize, HeadsShape, Loader

_THREADS = 384
_ROWS = MAX_PREFILL_RATIO  # heads of tokens that a block takes at a time
_TILE_KEYS = 128
_WARPS, _LANES = 8, 32  # of a block, that multiply


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a launch is told about one layer: matrices of its part of the pool, scale, window."""

    k: bytes
    v: bytes
    scale: float
    window: int


class PrefillAttention(AttentionBackend):
    """Attention of any number of query tokens per request; plans nothing on the host.

    The kernel reads lengths and page table on the device, and its blocks take work as they get
    done; few tokens behind many keys are split over them by their keys. Calls share the counter of
    what is taken, and memory for what is split, so they have to be on one stream.
    """

    def __init__(self, config: AttentionConfig, loader: Loader, device: DeviceSize) -> None:
        """Load the kernel, describe the pool to the device and allocate what parts leave.

        That is up to 70 KB per multiprocessor.

        Args:
            config: Of the engine; of float16 or bfloat16, head dimension 64 or 128.
            loader: Where kernels come from.
            device: That they run on; of the architecture of `ATTENTION_PREFILL`.

        Raises:
            PluginError: A KV head has too many query heads, a scale is not positive, or the
                kernel cannot be compiled or loaded.
        """
        self._config = config
        self._ratio = config.num_qo_heads // config.num_kv_heads
        if self._ratio > _ROWS:
            raise PluginError(
                f"--attn cuda: prefill serves at most {_ROWS} query heads per KV head, the model "
                f"has {self._ratio}"
            )
        self._launch = loader.load(ATTENTION_PREFILL, config.dtype)[
            f"attention_prefill_{config.head_dim}"
        ]
        self._heads_map = loader.heads_map
        self._num_sms = device.num_sms
        self._box_keys = math.gcd(config.context.page_size, _TILE_KEYS)
        self._layers = [self._layer(loader, layer_id) for layer_id in range(len(config.layers))]
        self._num_claimed = torch.zeros(1, dtype=torch.int32, device=config.device)
        # Of each warp's rows of a part the sums, a float4 per lane and 8 elements, and one more.
        num_warps = device.num_sms * _WARPS
        floats = num_warps * _LANES * 4 * (config.head_dim // 8 + 1)
        self._partials = torch.empty(floats, device=config.device)
        self._arrived = torch.zeros(num_warps, dtype=torch.int32, device=config.device)

    def _layer(self, loader: Loader, layer_id: int) -> _Layer:
        config, pool = self._config, self._config.context.kv_pool
        layer = config.layers[layer_id]
        if layer.sm_scale <= 0:
            raise PluginError(
                f"--attn cuda: layer {layer_id} scales scores by {layer.sm_scale}; prefill allows "
                "numbers above 0"
            )
        k, v = pool.k_slots(layer_id), pool.v_slots(layer_id)  # [slots, num_kv_heads, head_dim]
        k_map, v_map = (
            loader.matrix_map(each.data_ptr(), each.shape[0], each[0].numel(), self._box_keys)
            for each in (k, v)
        )
        return _Layer(k_map, v_map, layer.sm_scale * LOG2_E, layer.window_left)

    def prepare_metadata(self, batch: Batch) -> None:
        """Nothing to plan."""
        assert batch.is_prefill, "decode batches have a kernel of their own"

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        """Attend; see `AttentionBackend.forward`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward_into(out, q, layer_id, batch)
        return out

    def forward_into(self, out: Tensor, q: Tensor, layer_id: int, batch: Batch) -> None:
        """Attend into ``out``; see `AttentionBackend.forward_into`."""
        config, layer, ratio = self._config, self._layers[layer_id], self._ratio
        assert batch.table_idx is not None, "the engine sets table_idx"
        assert batch.seq_lens is not None, "the engine sets seq_lens"
        assert batch.cu_seqlens_q is not None, "the engine sets cu_seqlens_q"
        q = aligned_queries(q)
        num_tokens, num_reqs, block_tokens = q.shape[0], len(batch.table_idx), _ROWS // ratio
        shape = HeadsShape(num_tokens, config.num_qo_heads, config.head_dim, q.stride(0))
        max_jobs = (num_tokens // block_tokens + num_reqs) * config.num_kv_heads
        max_parts = max_jobs * -(-config.max_seq_len // _TILE_KEYS)
        page_table = config.context.page_table
        self._launch(
            (min(self._num_sms, max_parts), 1), (_THREADS, 1),
            self._heads_map(q.data_ptr(), shape, (block_tokens, ratio)), layer.k, layer.v,
            out.data_ptr(), page_table.data_ptr(), batch.table_idx.data_ptr(),
            batch.seq_lens.data_ptr(), batch.cu_seqlens_q.data_ptr(),
            self._num_claimed.data_ptr(), self._partials.data_ptr(), self._arrived.data_ptr(),
            page_table.shape[1], config.context.page_size, self._box_keys, num_reqs,
            config.num_kv_heads, ratio, layer.window, layer.scale,
            shared_bytes=ATTENTION_PREFILL.max_shared_bytes,
        )  # fmt: skip
