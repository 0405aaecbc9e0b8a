"""Norms, activations, embedding and the KV store, on the simulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.memory import RowMoves
from minisgl_kernels_cuda.norm import Norms
from minisgl_kernels_cuda.units import Loader
from tests.kernels_cuda.reference import BF16, F16, F32, assert_near, make, rms_norm

EPS = 1e-6


@pytest.mark.parametrize(
    ("dtype", "rows", "n"),
    [
        (BF16, 1, 1024), (BF16, 5, 128), (BF16, 2, 5120), (BF16, 3, 264), (BF16, 1, 20480),
        (F16, 3, 64), (F32, 2, 1024), (F32, 2, 6), (BF16, 0, 64),
    ],
)  # fmt: skip
def test_rms_norm_is_near_the_float64_norm(
    loader: Loader, dtype: torch.dtype, rows: int, n: int
) -> None:
    x, weight = make(rows, n, dtype=dtype), make(n, dtype=dtype, seed=1)
    before = x.clone()
    assert_near(Norms(loader, dtype).rms_norm(x, weight, EPS), rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


def test_rms_norm_reads_heads_inside_of_a_wider_row(loader: Loader) -> None:
    qkv, weight = make(3, 5 * 64, dtype=BF16), make(64, dtype=BF16, seed=1)
    heads = qkv.view(3, 5, 64)[:, 1:4]
    assert_near(Norms(loader, BF16).rms_norm(heads, weight, EPS), rms_norm(heads, weight, EPS))


@pytest.mark.parametrize(
    ("dtype", "rows", "n"),
    [(BF16, 1, 1024), (BF16, 7, 64), (BF16, 2, 8192), (F32, 2, 2048), (BF16, 2, 12)],
)
def test_fused_add_rms_norm_returns_norm_and_sum(
    loader: Loader, dtype: torch.dtype, rows: int, n: int
) -> None:
    x, residual = make(rows, n, dtype=dtype), make(rows, n, dtype=dtype, seed=1)
    weight = make(n, dtype=dtype, seed=2)
    expected = x + residual
    normed, total = Norms(loader, dtype).fused_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, expected)
    assert_near(normed, rms_norm(expected, weight, EPS))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize(
    ("dtype", "shape"), [(BF16, (1, 6144)), (F32, (2, 3, 40)), (BF16, (3, 34))]
)
def test_gated_activations_are_near_float64(
    loader: Loader, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu_and_mul": F.silu,
        "gelu_and_mul": F.gelu,
        "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh"),
    }
    x = make(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(build_activations(loader, dtype)[name](x), activations[name](gate) * up)


@pytest.mark.parametrize(("dtype", "hidden"), [(BF16, 1024), (F32, 12), (BF16, 6)])
def test_embedding_gives_zeros_for_ids_of_other_ranks(
    loader: Loader, dtype: torch.dtype, hidden: int
) -> None:
    weight = make(5, hidden, dtype=dtype)
    ids = torch.tensor([10, 14, 9, 15, 12], dtype=torch.int32)
    expected = torch.zeros(5, hidden, dtype=dtype)
    expected[[0, 1, 4]] = weight[[0, 4, 2]]
    assert torch.equal(RowMoves(loader).embedding(ids, weight, 10), expected)


@pytest.mark.parametrize("head_dim", [64, 3])
def test_store_kv_scatters_rows_that_are_strided(loader: Loader, head_dim: int) -> None:
    qkv = make(3, 6, head_dim, dtype=BF16)
    k, v = qkv[:, 2:4], qkv[:, 4:]
    k_pool, v_pool = torch.zeros(2, 9, 2, head_dim, dtype=BF16)
    slots = torch.tensor([7, 0, 5])
    RowMoves(loader).store_kv(k, v, k_pool, v_pool, slots)
    assert torch.equal(k_pool[slots], k)
    assert torch.equal(v_pool[slots], v)
    assert int(k_pool.any(-1).any(-1).sum()) == 3
