"""What happens between the products by our own C++ kernels, float32 on a CPU.

An op is one call of about a microsecond: inside of a step, where the weights that stream past evict
code and data, that is a tenth of what the calls of PyTorch cost that do the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.native.library import load_unit
from minisgl.ops.contract import KernelConfig, QKVInputs

_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Types of the arguments, as in sources/rows.cpp.
_SIGNATURES: Mapping[str, tuple[type, ...]] = {
    "rms_norm": (_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _FLOAT),
    "add_rms_norm": (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _FLOAT),
    "act_and_mul": (_COUNT, _POINTER, _POINTER, _COUNT, _COUNT),
    "embedding": (*(_POINTER,) * 3, *(_COUNT,) * 4),
    "store_kv": (_POINTER, _COUNT, _POINTER, _COUNT, *(_POINTER,) * 3, _COUNT, _COUNT),
    "rope": (_POINTER, _COUNT, _POINTER, _POINTER, *(_COUNT,) * 4),
    "norm_rope_store": (
        *(_POINTER, _COUNT, _COUNT, _COUNT, _COUNT),
        *(_POINTER, _POINTER, _FLOAT),
        *(_POINTER, _POINTER, _COUNT),
        *(_POINTER, _POINTER, _POINTER),
    ),
}
# ``enum Activation`` of sources/activation.h.
_ACTIVATIONS = {"silu_and_mul": 1, "gelu_and_mul": 2, "gelu_tanh_and_mul": 3}

_Kernel = Callable[..., None]


def row_ops(config: KernelConfig) -> Mapping[str, Callable[..., Any]]:
    """Return the ops of this module by name; the unit is compiled if it never was.

    Args:
        config: Of a CPU, in float32.

    Raises:
        CompileError: The unit cannot be had on this machine.
    """
    assert config.dtype == torch.float32, "the set's probe refuses other types"
    unit = load_unit("rows")
    kernels: dict[str, _Kernel] = {}
    for name, types in _SIGNATURES.items():
        kernel = kernels[name] = getattr(unit, name)
        kernel.argtypes, kernel.restype = types, None
    return {
        "rms_norm": partial(rms_norm, kernels["rms_norm"]),
        "fused_add_rms_norm": partial(fused_add_rms_norm, kernels["add_rms_norm"]),
        "rope": partial(rope, kernels["rope"]),
        "embedding": partial(embedding, kernels["embedding"]),
        "store_kv": partial(store_kv, kernels["store_kv"]),
        "qk_norm_rope_store": partial(qk_norm_rope_store, kernels["norm_rope_store"]),
        **{
            name: partial(act_and_mul, kernels["act_and_mul"], kind)
            for name, kind in _ACTIVATIONS.items()
        },
    }


def rms_norm(kernel: _Kernel, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do `minisgl.ops.contract.RMSNorm`."""
    width = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
    num_rows = rows.shape[0]
    out = torch.empty(x.shape, dtype=torch.float32)
    kernel(
        *(rows.data_ptr(), rows.stride(0), weight.data_ptr(), out.data_ptr()),
        *(num_rows, width, eps),
    )
    return out


def fused_add_rms_norm(
    kernel: _Kernel, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Do `minisgl.ops.contract.FusedAddRMSNorm`; both inputs are overwritten."""
    if not x.is_contiguous():
        x = x.contiguous()
    if not residual.is_contiguous():
        residual = residual.contiguous()
    num_rows, width = x.shape
    kernel(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_rows, width, eps)
    return x, residual


def act_and_mul(kernel: _Kernel, kind: int, x: Tensor) -> Tensor:
    """Do `minisgl.ops.contract.ActAndMul`."""
    *leading, width = x.shape
    x = x.contiguous()
    out = torch.empty((*leading, width // 2), dtype=torch.float32)
    kernel(kind, x.data_ptr(), out.data_ptr(), x.numel() // width, width // 2)
    return out


def embedding(kernel: _Kernel, ids: Tensor, weight: Tensor, vocab_start: int = 0) -> Tensor:
    """Do `minisgl.ops.contract.Embedding`."""
    num_rows, (num_ids, width) = ids.shape[0], weight.shape
    ids = ids.to(torch.int32).contiguous()
    out = torch.empty((num_rows, width), dtype=torch.float32)
    kernel(
        *(ids.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(num_rows, width, vocab_start, num_ids),
    )
    return out


def store_kv(
    kernel: _Kernel, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, out_loc: Tensor
) -> None:
    """Do `minisgl.ops.contract.StoreKV`."""
    num_rows, num_heads, head_dim = k.shape
    k, v = _with_adjacent_heads(k), _with_adjacent_heads(v)
    kernel(
        *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
        *(k_pool.data_ptr(), v_pool.data_ptr(), out_loc.data_ptr()),
        *(num_rows, num_heads * head_dim),
    )


def rope(
    kernel: _Kernel, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Do `minisgl.ops.contract.Rope`; q and k are overwritten."""
    q, k = _with_adjacent_heads(q), _with_adjacent_heads(k)
    positions = positions.to(torch.int32)
    for x in (q, k):
        kernel(
            *(x.data_ptr(), x.stride(0), positions.data_ptr(), cos_sin_cache.data_ptr()),
            *(*x.shape, cos_sin_cache.shape[1]),
        )
    return q, k


def qk_norm_rope_store(kernel: _Kernel, qkv: Tensor, inputs: QKVInputs) -> Tensor:
    """Do `minisgl.ops.contract.QKNormRopeStore`; the result is a view of ``qkv``."""
    num_q, num_kv, head_dim, q_norm, k_norm, eps = inputs[:6]
    if not qkv.is_contiguous():
        qkv = qkv.contiguous()
    num_rows, width = qkv.shape
    kernel(
        *(qkv.data_ptr(), num_rows, num_q, num_kv, head_dim),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        *(inputs.positions.data_ptr(), inputs.cos_sin_cache.data_ptr()),
        inputs.cos_sin_cache.shape[1],
        *(inputs.k_pool.data_ptr(), inputs.v_pool.data_ptr(), inputs.out_loc.data_ptr()),
    )
    return qkv.as_strided((num_rows, num_q, head_dim), (width, head_dim, 1))


def _with_adjacent_heads(x: Tensor) -> Tensor:
    """Return ``x[num_tokens, heads, head_dim]`` as it is or, where heads are apart, a copy."""
    _, head_stride, stride = x.stride()
    is_adjacent = stride == 1 and (head_stride == x.shape[2] or x.shape[1] == 1)
    return x if is_adjacent else x.contiguous()
