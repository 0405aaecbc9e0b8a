"""The native ops on rows against those in PyTorch, where the conformance suite does not look.

float32; sums of at most 3000 terms in another order: 2e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.native.library import unavailable_reason
from minisgl.ops import torch_ops
from minisgl.ops.contract import KernelConfig, QKVInputs
from minisgl.ops.native_rows import row_ops
from minisgl.ops.table import compose_qk_norm_rope_store

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native code: {unavailable_reason()}"
)

Ops = Mapping[str, Callable[..., Any]]  # each op has its own signature
# Less than a vector, a vector and a bit, many; rows enough for several threads.
WIDTHS = (1, 7, 16, 33, 576, 3001)
NUM_ROWS = (0, 1, 5, 200)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return row_ops(KernelConfig(torch.device("cpu"), torch.float32))


def randn(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_any_size(ops: Ops, num_rows: int, width: int) -> None:
    x, residual, weight = randn(num_rows, width), randn(num_rows, width) * 2, randn(width)
    close(ops["rms_norm"](x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    expected = torch_ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    actual = ops["fused_add_rms_norm"](x.clone(), residual.clone(), weight, 1e-5)
    for mine, theirs in zip(actual, expected, strict=True):
        close(mine, theirs)


def test_a_norm_takes_rows_that_are_apart_and_any_dimensions(ops: Ops) -> None:
    weight, x = randn(24), randn(6, 5, 48)
    for part in (x[:, 1, :24], x[:, 1:4, 24:], x[0, 0, ::2], x.transpose(0, 1)[..., :24]):
        close(ops["rms_norm"](part, weight, 1e-6), torch_ops.rms_norm(part, weight, 1e-6))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("width", WIDTHS)
def test_activations_of_any_size(ops: Ops, name: str, width: int) -> None:
    for num_rows in NUM_ROWS:
        x = randn(num_rows, 2 * width) * 4
        close(ops[name](x), getattr(torch_ops, name)(x))


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_activations_of_large_numbers_are_finite(ops: Ops, scale: float) -> None:
    x = torch.tensor([[-scale, scale, 2.0, 3.0]])
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        close(ops[name](x), getattr(torch_ops, name)(x))


@pytest.mark.parametrize("start", [0, 10])
def test_an_embedding_gives_zeros_for_ids_of_others(ops: Ops, start: int) -> None:
    ids, weight = torch.tensor([0, 9, 10, 29, 30, 12, 39, 40], dtype=torch.int32), randn(30, 19)
    close(ops["embedding"](ids, weight, start), torch_ops.embedding(ids, weight, start))


def test_a_view_of_ids_is_read_with_its_stride(ops: Ops) -> None:
    ids, weight = torch.arange(12, dtype=torch.int32), randn(12, 8)
    close(ops["embedding"](ids[::3], weight, 0), weight[::3])


def test_keys_and_values_are_stored_where_they_belong(ops: Ops) -> None:
    heads, slots = randn(40, 9, 24), torch.randperm(64)[:40]
    pools, expected = torch.zeros(2, 64, 3, 24), torch.zeros(2, 64, 3, 24)
    for store, target in ((ops["store_kv"], pools), (torch_ops.store_kv, expected)):
        store(heads[:, 3:6], heads[:, 6:], target[0], target[1], slots)
    assert torch.equal(pools, expected)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (40, 40), (64, 64), (96, 24)])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_what_lies_between_product_and_attention(
    ops: Ops, head_dim: int, rotary_dim: int, has_norms: bool, num_rows: int
) -> None:
    num_q, num_kv = 6, 2
    qkv, cache = randn(num_rows, (num_q + 2 * num_kv) * head_dim), randn(500, rotary_dim)
    slots = torch.randperm(512)[:num_rows]
    results = []
    composed = compose_qk_norm_rope_store(torch_ops.rms_norm, torch_ops.rope, torch_ops.store_kv)
    for op in (ops["qk_norm_rope_store"], composed):
        pools = torch.zeros(2, 512, num_kv, head_dim)
        inputs = QKVInputs(
            num_q,
            num_kv,
            head_dim,
            randn(head_dim) if has_norms else None,
            randn(head_dim) + 1 if has_norms else None,
            1e-5,
            torch.arange(num_rows, dtype=torch.int32) + 100,
            cache,
            pools[0],
            pools[1],
            slots,
        )
        results.append((op(qkv.clone(), inputs), pools))
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs)


def test_a_rotation_takes_heads_that_are_not_adjacent(ops: Ops) -> None:
    q, k, cache = randn(4, 7, 16).transpose(0, 1), randn(7, 2, 16), randn(32, 16)
    positions = torch.arange(7, dtype=torch.int32)
    expected = torch_ops.rope(q, k, positions, cache)
    for mine, theirs in zip(ops["rope"](q, k, positions, cache), expected, strict=True):
        close(mine, theirs)
