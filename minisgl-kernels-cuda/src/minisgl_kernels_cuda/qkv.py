"""Norm, rotation and KV store between the q/k/v product and attention, as one op."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.ops.contract import QKVInputs
from minisgl_kernels_cuda.units import QKV, Loader

_THREADS = 128  # four heads
_WHOLE_HEADS = (64, 128, 256)
# A warp takes so many heads of a token where there are several rounds of warps at one head each:
# on an H200 8192 tokens of 32 heads take 47 us so, against 79; 256 tokens 4.9 against 3.9.
_MANY_HEADS = 4
_MANY_WARPS = 32_768


class QKVStage:
    """``qk_norm_rope_store`` of one element type."""

    def __init__(self, loader: Loader, dtype: torch.dtype) -> None:
        """Load the kernels."""
        launches = loader.load(QKV, dtype)
        self._whole = {
            (dim, heads): launches[f"qkv_{dim}_{heads}"]
            for dim in _WHOLE_HEADS
            for heads in (1, _MANY_HEADS)
        }
        self._any = launches["qkv_any"]

    def qk_norm_rope_store(self, qkv: Tensor, inputs: QKVInputs) -> Tensor:
        """Norm, rotate and store; see `minisgl.ops.contract.QKNormRopeStore`.

        Queries are changed in place; the keys and values of ``qkv`` are left as they were.
        """
        num_tokens, num_qo, num_kv = qkv.shape[0], inputs.num_qo_heads, inputs.num_kv_heads
        head_dim, rotary_dim = inputs.head_dim, inputs.cos_sin_cache.shape[1]
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()
        # Lanes read up to 16 bytes at a time.
        is_aligned = qkv.stride(0) * qkv.element_size() % 16 == 0 and qkv.data_ptr() % 16 == 0
        launch, heads_per_warp = self._any, 1
        if rotary_dim == head_dim and is_aligned and head_dim in _WHOLE_HEADS:
            is_many = num_tokens * (num_qo + 2 * num_kv) >= _MANY_WARPS
            heads_per_warp = _MANY_HEADS if is_many else 1
            launch = self._whole[head_dim, heads_per_warp]
        if num_tokens:
            num_warps = num_tokens * -(-(num_qo + 2 * num_kv) // heads_per_warp)
            launch(
                (-(-num_warps * 32 // _THREADS), 1), (_THREADS, 1),
                qkv.data_ptr(), _address(inputs.q_norm), _address(inputs.k_norm),
                inputs.positions.data_ptr(), inputs.cos_sin_cache.data_ptr(),
                inputs.k_pool.data_ptr(), inputs.v_pool.data_ptr(), inputs.out_loc.data_ptr(),
                qkv.stride(0), num_tokens, num_qo, num_kv, head_dim, rotary_dim, inputs.eps,
            )  # fmt: skip
        q: Tensor = qkv[:, : num_qo * head_dim].unflatten(1, (num_qo, head_dim))
        return q


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
