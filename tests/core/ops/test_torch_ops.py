"""The torch kernel set against float64 references and Hugging Face's own code."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from minisgl.ops import torch_ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_cache(rotary_dim: int, num_positions: int = 50) -> Tensor:
    frequencies = 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(num_positions).float().outer(frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def naive_rope(x: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    half = cache.shape[1] // 2
    out = x.double().clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = cache[position, i].double(), cache[position, half + i].double()
            a, b = x[token, :, i].double(), x[token, :, half + i].double()
            out[token, :, i] = a * cos - b * sin
            out[token, :, half + i] = b * cos + a * sin
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 4, 16), (0, 64)])
def test_rms_norm_follows_hugging_face(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(shape).to(dtype)
    out, before = torch_ops.rms_norm(x, norm.weight.data, 1e-5), x.clone()
    assert out.dtype == dtype
    assert torch.equal(x, before)
    # The half types are equal bit by bit; float32 sums in another order.
    tolerance = 2e-6 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(out, norm(x).detach(), rtol=tolerance, atol=tolerance)


def test_rms_norm_adds_eps_to_the_mean_square() -> None:
    x = torch.full((2, 8), 1e-3)
    out = torch_ops.rms_norm(x, torch.ones(8), 1e-6)
    torch.testing.assert_close(out, torch.full((2, 8), 1 / math.sqrt(2)))
    assert torch.equal(
        torch_ops.rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-6), torch.zeros(1, 8)
    )


def test_rms_norm_takes_strided_heads() -> None:
    heads = torch.randn(3, 10, 16)[:, 2:6]
    out = torch_ops.rms_norm(heads, torch.ones(16), 1e-5)
    torch.testing.assert_close(out, torch_ops.rms_norm(heads.contiguous(), torch.ones(16), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_fused_add_rms_norm_norms_the_sum(dtype: torch.dtype, num_rows: int) -> None:
    x, residual = (torch.randn(num_rows, 32).to(dtype) for _ in range(2))
    total, weight = x + residual, torch.randn(32).to(dtype)
    normed, new_residual = torch_ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert new_residual.data_ptr() == residual.data_ptr()
    # Few rows are summed in another order; the half types are equal bit by bit.
    tolerance = 2e-6 if dtype == torch.float32 else 0.0
    expected = torch_ops.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_heads_norms_q_and_k_by_their_own_weights(dtype: torch.dtype) -> None:
    qkv, weights = torch.randn(3, 10, 16).to(dtype), torch.randn(2, 16).to(dtype)
    out = torch_ops.norm_heads(qkv[:, :8], (weights[0], weights[1]), 6, 1e-5)
    q = torch_ops.rms_norm(qkv[:, :6], weights[0], 1e-5)
    k = torch_ops.rms_norm(qkv[:, 6:8], weights[1], 1e-5)
    assert torch.equal(out, torch.cat((q, k), dim=1))


@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rope_rotates_the_first_dimensions(rotary_dim: int, index_dtype: torch.dtype) -> None:
    qkv = torch.randn(4, 6, 16)
    q, k = qkv[:, :3], qkv[:, 3:5]
    positions = torch.tensor([0, 7, 49, 3], dtype=index_dtype)
    cache = make_cache(rotary_dim)
    out_q, out_k = torch_ops.rope(q, k, positions, cache)
    torch.testing.assert_close(out_q.double(), naive_rope(q, positions, cache), atol=1e-6, rtol=0)
    torch.testing.assert_close(out_k.double(), naive_rope(k, positions, cache), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_follows_hugging_face(dtype: torch.dtype) -> None:
    q, k = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    positions, cache = torch.arange(5) + 30, make_cache(16)
    cos, sin = (torch.cat((half, half), -1)[None].to(dtype) for half in cache[30:35].chunk(2, -1))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for actual, wanted in zip(torch_ops.rope(q, k, positions, cache), expected, strict=True):
        # The half types are equal bit by bit; in float32 a multiply-add may round once less.
        tolerance = 1e-6 if dtype == torch.float32 else 0.0
        wanted_rows = wanted[0].transpose(0, 1)
        torch.testing.assert_close(actual, wanted_rows, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 3, 300])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope_rows_are_shared_among_calls(num_tokens: int, rotary_dim: int) -> None:
    x, cache = torch.randn(num_tokens, 5, 16), make_cache(rotary_dim)
    positions = torch.arange(num_tokens) % 50
    rows = torch_ops.rope_rows(positions, cache, torch.float32)
    q, k = torch_ops.rope(x[:, :3], x[:, 3:], positions, cache)
    # A matrix product may round once less.
    expected = torch.cat((q, k), dim=1)
    torch.testing.assert_close(torch_ops.apply_rope(x, *rows), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "act"),
    [
        (torch_ops.silu_and_mul, torch.nn.functional.silu),
        (torch_ops.gelu_and_mul, torch.nn.functional.gelu),
        (
            torch_ops.gelu_tanh_and_mul,
            lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        ),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations_multiply_the_halves(
    op: Callable[[Tensor], Tensor], act: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.randn(3, 40).to(dtype)
    before = x.clone()
    # As in Hugging Face: the activation is rounded to the dtype, then the product.
    torch.testing.assert_close(op(x), act(x[:, :20].contiguous()) * x[:, 20:])
    assert torch.equal(x, before)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_embedding_of_other_shards_is_zero(index_dtype: torch.dtype) -> None:
    whole = torch.randn(12, 6)
    ids = torch.tensor([0, 3, 4, 7, 8, 11], dtype=index_dtype)
    shards = [torch_ops.embedding(ids, whole[s : s + 4], s) for s in (0, 4, 8)]
    assert torch.equal(shards[1][[0, 1, 4, 5]], torch.zeros(4, 6))
    assert torch.equal(torch.stack(shards).sum(0), whole[ids.long()])


def test_store_kv_writes_only_its_slots() -> None:
    k_pool, v_pool = torch.zeros(10, 2, 4), torch.zeros(10, 2, 4)
    qkv = torch.randn(3, 8, 4)
    slots = torch.tensor([7, 0, 4])
    torch_ops.store_kv(qkv[:, 2:4], qkv[:, 4:6], k_pool, v_pool, slots)
    assert torch.equal(k_pool[slots], qkv[:, 2:4])
    assert torch.equal(v_pool[slots], qkv[:, 4:6])
    others = torch.tensor([1, 2, 3, 5, 6, 8, 9])
    assert not k_pool[others].any()
    assert not v_pool[others].any()
