"""The kernel set in plain PyTorch: correct on a CPU and on CUDA, for every float dtype.

Each function rounds where Hugging Face rounds (norms and rotations are computed in float32), so
that greedy output in float32 equals theirs token for token and bfloat16 follows theirs closely.
On a CPU what is not a product costs calls, each several times more than in a loop of its own,
because the weights that stream past evict the code. So every function makes as few calls as it
can, and as cheap ones; ``benchmarks/cpu_ops.py`` compares them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# A single row of up to so many columns is normed in numpy, which takes three quarters of torch's
# time; beyond, numpy's dot product starts threads.
_MAX_NUMPY_COLUMNS = 8192
# Most elements of the matrices by which a few tokens are rotated.
_MAX_MATRIX_ELEMENTS = 1 << 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: ``[..., hidden]``, any float dtype.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: Added to the mean square.

    Returns:
        ``weight * (x / rms(x))`` in the shape and dtype of ``x``. The quotient is computed in
        float32 and rounded to the dtype of ``x`` before the product, as Hugging Face does.

    Source: arXiv:1910.07467.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return (x * _rms_scale(x, eps)).mul_(weight)
    x32 = x.float()
    scale = x32.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return (x32 * scale).to(x.dtype).mul_(weight)


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    """Return one over the root mean square of float32 ``x``, ``[..., 1]``, in three calls."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps), scale, scale, value=1 / x.shape[-1]).rsqrt_()


@lru_cache(maxsize=16)
def _constant(value: float) -> Tensor:
    """Return ``value`` as a float32 tensor on the CPU; making one costs as much as a norm."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream, then norm the sum.

    Args:
        x: ``[..., hidden]``, the output of the last block. It may be overwritten.
        residual: Shape and dtype of ``x``. It is overwritten with the sum.
        weight: ``[hidden]``.
        eps: Added to the mean square.

    Returns:
        ``(rms_norm(residual + x), residual + x)``; the second shares storage with ``residual``.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        residual.add_(x)
        return rms_norm(residual, weight, eps), residual
    if x.dim() == 2 and x.shape[0] == 1 and x.shape[1] <= _MAX_NUMPY_COLUMNS:
        _add_rms_norm_in_numpy(x.numpy()[0], residual.numpy()[0], weight.numpy(), eps)
        return x, residual
    residual.add_(x)
    return torch.mul(residual, _rms_scale(residual, eps), out=x).mul_(weight), residual


def _add_rms_norm_in_numpy(
    x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float
) -> None:
    """Do `fused_add_rms_norm` on ``[hidden]`` float32 arrays; the norm overwrites ``x``."""
    np.add(residual, x, residual)
    np.multiply(residual, 1 / math.sqrt(residual.dot(residual) / len(x) + eps), x)
    np.multiply(x, weight, x)


def norm_heads(heads: Tensor, norms: tuple[Tensor, Tensor], num_q: int, eps: float) -> Tensor:
    """Norm the heads of q and of k, whose weights differ, in one tensor.

    Args:
        heads: ``[num_tokens, num_qo_heads + num_kv_heads, head_dim]``, any strides.
        norms: The weights ``[head_dim]`` of q and of k.
        num_q: Heads of q, which come first.
        eps: Added to the mean square.

    Returns:
        A new tensor like ``heads``; each part is what ``rms_norm`` makes of it.
    """
    if heads.dtype == torch.float32 and heads.device.type == "cpu":
        normed = heads * _rms_scale(heads, eps)
    else:
        heads32 = heads.float()
        scale = heads32.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        normed = (heads32 * scale).to(heads.dtype)
    normed[:, :num_q].mul_(norms[0])
    normed[:, num_q:].mul_(norms[1])
    return normed


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` dimensions of each head, in the split-half (neox) order.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, any float dtype, any strides.
        k: ``[num_tokens, num_kv_heads, head_dim]``.
        positions: ``[num_tokens]``, int32 or int64.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, cosines in the first half and
            sines in the second.

    Returns:
        New rotated ``q`` and ``k`` in their dtypes; the inputs are unchanged.

    Source: arXiv:2104.09864, in the layout of Llama.
    """
    cos, sin = _cos_sin(positions, cos_sin_cache, q.dtype)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


def rope_rows(
    positions: Tensor, cos_sin_cache: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Look up what ``apply_rope`` needs; do it once per step and share it among the layers.

    Args:
        positions: ``[num_tokens]``, int32 or int64.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, as for ``rope``.
        dtype: Of the queries; the tables are rounded to it, as Hugging Face does.

    Returns:
        ``cos`` and ``sin``, each ``[num_tokens, 1, rotary_dim]``; the first half of ``sin`` is
        negated, so that a rotation is ``x * cos + swapped_halves(x) * sin``. For a few tokens in
        float32 on a CPU, instead: ``[num_tokens, rotary_dim, rotary_dim]`` by which the heads of
        each token are multiplied, and an empty tensor.
    """
    cos, sin = _cos_sin(positions, cos_sin_cache, dtype)
    num_tokens, _, rotary_dim = cos.shape
    is_small = num_tokens * rotary_dim**2 <= _MAX_MATRIX_ELEMENTS
    if not is_small or dtype != torch.float32 or cos.device.type != "cpu":
        return cos, sin
    # One product per layer, where a rotation by parts takes three calls.
    matrices = cos.new_zeros(num_tokens, rotary_dim, rotary_dim)
    half = rotary_dim // 2
    matrices.diagonal(0, 1, 2).copy_(cos[:, 0])
    matrices.diagonal(half, 1, 2).copy_(sin[:, 0, half:])
    matrices.diagonal(-half, 1, 2).copy_(sin[:, 0, :half])
    return matrices, cos.new_empty(0)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by what ``rope_rows`` returned.

    Args:
        x: ``[num_tokens, heads, head_dim]``; queries and keys may share one call.
        cos: ``[num_tokens, 1, rotary_dim]`` in the dtype of ``x``, or the matrices.
        sin: Like ``cos``, or empty.

    Returns:
        A new tensor like ``x``, rotated in its first ``rotary_dim`` dimensions.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim != x.shape[-1]:
        rotated = apply_rope(x[..., :rotary_dim], cos, sin)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    if not sin.numel():
        return torch.bmm(x, cos)
    if x.dtype != torch.float32:
        return (x * cos).add_(x.roll(rotary_dim // 2, -1).mul_(sin))
    half = rotary_dim // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _cos_sin(positions: Tensor, cos_sin_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the two tables that `rope_rows` describes."""
    cos, sin = cos_sin_cache.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` where ``x`` is ``[..., gate | up]``; returns ``[..., half]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor) -> Tensor:
    """``gelu(gate) * up`` (exact) where ``x`` is ``[..., gate | up]``; returns ``[..., half]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Like ``gelu_and_mul`` with the tanh approximation."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def embedding(ids: Tensor, weight: Tensor, vocab_start: int = 0) -> Tensor:
    """Look up rows of one shard of the vocabulary.

    Args:
        ids: ``[num_tokens]``, int32 or int64, ids of the whole vocabulary.
        weight: ``[rows, hidden]``, the rows ``vocab_start ..< vocab_start + rows``.
        vocab_start: First id of the shard. Ids outside of the shard give rows of zeros, so that
            the sum over all shards is the embedding.

    Returns:
        ``[num_tokens, hidden]`` in the dtype of ``weight``.
    """
    local = ids - vocab_start if vocab_start else ids
    outside = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(outside, 0), weight)
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, out_loc: Tensor) -> None:
    """Write the keys and values of new tokens into their slots of one layer's pool.

    Args:
        k: ``[num_tokens, num_kv_heads, head_dim]``.
        v: Like ``k``.
        k_pool: ``[num_slots, num_kv_heads, head_dim]``; slot = page * page_size + offset.
        v_pool: Like ``k_pool``.
        out_loc: ``[num_tokens]`` int64, the slot of each token.
    """
    k_pool.index_copy_(0, out_loc, k)
    v_pool.index_copy_(0, out_loc, v)
