from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.errors import PluginError
from minisgl.ops.contract import KernelConfig, KernelSet, KernelTable, QKVInputs
from minisgl.ops.table import COMPOSED, build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet

NUM_Q, NUM_KV, HEAD_DIM, NUM_TOKENS = 6, 2, 8, 5


class FakeSet(KernelSet):
    def __init__(self, **ops: Callable[..., Any]) -> None:
        self._ops = ops

    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return self._ops


def torch_set() -> KernelSet:
    return TorchKernelSet(KernelConfig(torch.device("cpu"), torch.float32))


def table_of(**ops: Callable[..., Any]) -> KernelTable:
    return build_kernel_table([("fake", FakeSet(**ops)), ("torch", torch_set())])


def qkv_inputs(has_norm: bool) -> tuple[Tensor, QKVInputs]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs = QKVInputs(
        num_qo_heads=NUM_Q,
        num_kv_heads=NUM_KV,
        head_dim=HEAD_DIM,
        q_norm=random(HEAD_DIM) if has_norm else None,
        k_norm=random(HEAD_DIM) if has_norm else None,
        eps=1e-5,
        positions=torch.tensor([3, 0, 1, 7, 2], dtype=torch.int32),
        cos_sin_cache=random(8, HEAD_DIM),
        k_pool=torch.zeros(16, NUM_KV, HEAD_DIM),
        v_pool=torch.zeros(16, NUM_KV, HEAD_DIM),
        out_loc=torch.tensor([9, 2, 11, 0, 5]),
    )
    return random(NUM_TOKENS, (NUM_Q + 2 * NUM_KV) * HEAD_DIM), inputs


def test_each_op_comes_from_the_first_set_that_has_it() -> None:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    table = table_of(rms_norm=rms_norm)
    assert table.rms_norm is rms_norm
    assert table.sources["rms_norm"] == "fake"
    assert table.sources["silu_and_mul"] == "torch"


class Doubled:
    """A product whose weight is not read."""

    is_original_needed = False

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x


def pack_doubled(weight: Tensor, bias: Tensor | None) -> Doubled:
    return Doubled()


def pack_gated(weight: Tensor, bias: Tensor | None, activation: str) -> Doubled:
    return Doubled()


def test_a_gated_product_is_composed_of_the_chosen_product_and_activation() -> None:
    table = table_of(pack_linear=pack_doubled, gelu_and_mul=lambda x: x + 1)
    packed = table.pack_gated_linear(torch.empty(2, 2), None, "gelu")
    assert not packed.is_original_needed
    assert torch.equal(packed(torch.ones(1, 2)), torch.full((1, 2), 3.0))
    assert table.sources["pack_gated_linear"] == COMPOSED


@pytest.mark.parametrize("has_product", [True, False])
def test_a_gated_product_comes_from_the_set_of_the_product_or_is_composed(
    has_product: bool,
) -> None:
    ops: dict[str, Callable[..., Any]] = {"pack_gated_linear": pack_gated}
    table = table_of(**ops, **({"pack_linear": pack_doubled} if has_product else {}))
    assert (table.pack_gated_linear is pack_gated) is has_product


def test_a_chain_that_lacks_an_op_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="--kernels fake: no set of the chain has .*rms_norm"):
        build_kernel_table([("fake", FakeSet())])


def test_an_unknown_op_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="--kernels fake: .* unknown op 'rms_nrom'"):
        table_of(rms_nrom=lambda: None)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_rows", [True, False])
def test_the_composed_op_norms_rotates_and_stores(has_norm: bool, has_rows: bool) -> None:
    table = table_of()
    qkv, inputs = qkv_inputs(has_norm)
    q, k, v = qkv.clone().view(NUM_TOKENS, -1, HEAD_DIM).split((NUM_Q, NUM_KV, NUM_KV), dim=1)
    if inputs.q_norm is not None and inputs.k_norm is not None:
        q = table.rms_norm(q, inputs.q_norm, inputs.eps)
        k = table.rms_norm(k, inputs.k_norm, inputs.eps)
    q, k = table.rope(q, k, inputs.positions, inputs.cos_sin_cache)
    if has_rows:
        assert table.rope_rows is not None
        rows = table.rope_rows(inputs.positions, inputs.cos_sin_cache, torch.float32)
        inputs = inputs._replace(rope_rows=rows)
    result = table.qk_norm_rope_store(qkv, inputs)
    assert table.sources["qk_norm_rope_store"] == COMPOSED
    torch.testing.assert_close(result, q, rtol=0, atol=1e-6)  # the same sums in another order
    torch.testing.assert_close(inputs.k_pool[inputs.out_loc], k, rtol=0, atol=1e-6)
    assert torch.equal(inputs.v_pool[inputs.out_loc], v)
    assert inputs.k_pool.abs().sum(dim=(1, 2)).count_nonzero() == NUM_TOKENS


def test_the_composed_op_is_made_of_the_chosen_parts() -> None:
    stored = []

    def rope(q: Tensor, k: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return q + 1, k + 2

    def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, out_loc: Tensor) -> None:
        stored.append(k)

    table = table_of(rope=rope, store_kv=store_kv)
    qkv, inputs = qkv_inputs(has_norm=False)
    heads = qkv.clone().view(NUM_TOKENS, -1, HEAD_DIM)
    q = table.qk_norm_rope_store(qkv, inputs)
    assert torch.equal(q, heads[:, :NUM_Q] + 1)
    assert torch.equal(stored[0], heads[:, NUM_Q : NUM_Q + NUM_KV] + 2)


def test_rows_are_not_looked_up_for_a_rotation_that_does_not_take_them() -> None:
    assert table_of().rope_rows is not None
    assert table_of(rope=lambda *_: None).rope_rows is None
    assert table_of(qk_norm_rope_store=lambda *_: None).rope_rows is None
