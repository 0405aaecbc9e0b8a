"""Norm, rotation and KV store between the q/k/v product and attention, as one op."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.ops.contract import QKVInputs
from minisgl_kernels_cuda.units import QKV, Loader, piece_size

_THREADS = 128
_WARP = 32
_WHOLE_HEADS = (64, 128, 256)


class QKVStage:
    """``qk_norm_rope_store`` of one element type.

    The kernel may read positions, slots, the table of angles and the weights of the norms before
    work that was submitted earlier has ended: they must have been written before the last kernel of
    the stream that was launched without programmatic dependent launch, as a step's inputs are.
    """

    def __init__(self, loader: Loader, dtype: torch.dtype) -> None:
        """Load the kernels."""
        launches = loader.load(QKV, dtype)
        self._whole = {dim: launches[f"qkv_{dim}"] for dim in _WHOLE_HEADS}
        self._piece = piece_size(dtype)
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
        has_norms = (inputs.q_norm is None) == (inputs.k_norm is None)
        launch, lanes = self._any, _WARP
        if rotary_dim == head_dim and is_aligned and has_norms and head_dim in _WHOLE_HEADS:
            launch, lanes = self._whole[head_dim], head_dim // (2 * self._piece)
        if num_tokens:
            num_threads = num_tokens * (num_qo + 2 * num_kv) * lanes
            launch(
                (-(-num_threads // _THREADS), 1), (_THREADS, 1),
                qkv.data_ptr(), _address(inputs.q_norm), _address(inputs.k_norm),
                inputs.positions.data_ptr(), inputs.cos_sin_cache.data_ptr(),
                inputs.k_pool.data_ptr(), inputs.v_pool.data_ptr(), inputs.out_loc.data_ptr(),
                qkv.stride(0), num_tokens, num_qo, num_kv, head_dim, rotary_dim, inputs.eps,
            )  # fmt: skip
        q: Tensor = qkv[:, : num_qo * head_dim].unflatten(1, (num_qo, head_dim))
        return q


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
