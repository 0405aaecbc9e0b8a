"""What every kernel set has to do; see `minisgl.ops.contract`.

A set is tested on the ops that it offers. Results are compared with float64; see
`reference.tolerance` for the width. Sampling is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.ops.contract import OPS, PACKERS, KernelConfig, KernelSet, QKVInputs
from minisgl.testing import reference
from minisgl.testing.captured_step import CapturedStep
from minisgl.testing.reference import assert_close
from minisgl.testing.selection import TestedBackend

DTYPES = ("float32", "float16", "bfloat16")
NUM_TOKENS = (1, 3, 17, 130)
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Kernels:
    """A set's ops for one type, and random inputs for them."""

    ops: Mapping[str, Callable[..., Any]]  # Any: each op has its own signature
    dtype: torch.dtype
    device: torch.device
    random: torch.Generator

    def op(self, name: str) -> Callable[..., Any]:  # Any: as above
        """Return an op, or skip the test."""
        if name not in self.ops:
            pytest.skip(f"the set leaves {name} to others")
        return self.ops[name]

    def randn(self, *size: int, scale: float = 1.0) -> Tensor:
        """Return normal numbers of the set's type."""
        return (torch.randn(size, generator=self.random) * scale).to(self.device, self.dtype)

    def int32(self, *values: int) -> Tensor:
        """Return ``[n]`` int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def close(self, actual: Tensor, expected: Tensor, rule: str) -> None:
        """Compare with the reference; the rule begins with the op's name."""
        op = rule.split()[0]
        assert op in reference.TOLERANCES, f"{op}: declares no tolerance"
        assert_close(actual, expected, self.dtype, rule, op)


@pytest.fixture(params=DTYPES)
def kernels(backend: TestedBackend, request: pytest.FixtureRequest) -> Kernels:
    """The set for one type; skipped where its probe refuses the type."""
    reason = backend.refusal(dtype=request.param)
    if reason:
        pytest.skip(reason)
    dtype: torch.dtype = getattr(torch, request.param)
    device = torch.device(backend.machine.device)
    made: KernelSet = backend.build(KernelConfig(device=device, dtype=dtype))
    return Kernels(made.ops(), dtype, device, torch.Generator().manual_seed(0))


def test_only_known_ops_are_offered(kernels: Kernels) -> None:
    unknown = set(kernels.ops) - {*OPS, *PACKERS}
    assert not unknown, "ops() offers the ops of the contract and no others"


@pytest.mark.parametrize("width", [64, 96, 576, 2048, 5120])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rms_norm(kernels: Kernels, num_tokens: int, width: int) -> None:
    op = kernels.op("rms_norm")
    x, weight = kernels.randn(num_tokens, width, scale=3), kernels.randn(width)
    before = x.clone()
    result = op(x, weight, EPS)
    assert torch.equal(x, before), "rms_norm does not change x"
    rule = "rms_norm divides by the root of the mean square and multiplies by the weight"
    kernels.close(result, reference.rms_norm(x, weight, EPS), rule)


def test_rms_norm_of_heads_in_a_product(kernels: Kernels) -> None:
    op = kernels.op("rms_norm")
    heads = kernels.randn(9, 12, 64)[:, 4:8]
    weight = kernels.randn(64)
    expected = reference.rms_norm(heads, weight, EPS)
    kernels.close(op(heads, weight, EPS), expected, "rms_norm takes any leading dimensions")


@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_rms_norm_of_small_and_large_numbers(kernels: Kernels, scale: float) -> None:
    op = kernels.op("rms_norm")
    x, weight = kernels.randn(5, 256, scale=scale), kernels.randn(256)
    expected = reference.rms_norm(x, weight, 1e-6)
    kernels.close(op(x, weight, 1e-6), expected, "rms_norm computes in float32")


@pytest.mark.parametrize("width", [64, 96, 576, 2048])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_fused_add_rms_norm(kernels: Kernels, num_tokens: int, width: int) -> None:
    op = kernels.op("fused_add_rms_norm")
    x, residual = kernels.randn(num_tokens, width), kernels.randn(num_tokens, width)
    weight = kernels.randn(width)
    total = x.double() + residual.double()
    normed, summed = op(x.clone(), residual.clone(), weight, EPS)
    kernels.close(summed, total, "fused_add_rms_norm returns x + residual as its second result")
    expected = reference.rms_norm(total, weight, EPS)
    kernels.close(
        normed, expected, "fused_add_rms_norm returns the norm of the sum as its first result"
    )


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (96, 96), (128, 64)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (3, 1)])
def test_rope(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    op = kernels.op("rope")
    heads = kernels.randn(21, num_heads + 2 * num_kv_heads, head_dim)
    cache = cos_sin_cache(kernels, rotary_dim)
    positions = kernels.int32(*range(0, 21 * 90, 90))
    split = num_heads + num_kv_heads
    expected = reference.rope(heads, positions, cache)
    q, k = op(heads[:, :num_heads], heads[:, num_heads:split], positions, cache)
    kernels.close(q, expected[:, :num_heads], "rope rotates q by its positions")
    kernels.close(k, expected[:, num_heads:split], "rope rotates k by its positions")


def cos_sin_cache(kernels: Kernels, rotary_dim: int, max_positions: int = 2048) -> Tensor:
    """Make ``[max_positions, rotary_dim]`` float32."""
    half = rotary_dim // 2
    angles = torch.outer(torch.arange(max_positions), 10000 ** -(torch.arange(half) / half))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(kernels.device)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 64)])
def test_rope_in_two_parts(kernels: Kernels, head_dim: int, rotary_dim: int) -> None:
    rope_rows, apply_rope = kernels.op("rope_rows"), kernels.op("apply_rope")
    heads = kernels.randn(13, 6, head_dim)[:, :4]
    cache, positions = cos_sin_cache(kernels, rotary_dim), kernels.int32(*range(5, 18))
    rotated = apply_rope(heads, *rope_rows(positions, cache, kernels.dtype))
    expected = reference.rope(heads, positions, cache)
    kernels.close(rotated, expected, "apply_rope of rope_rows gives what rope gives")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [32, 48, 1536, 4864])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_gated_activations(kernels: Kernels, num_tokens: int, width: int, activation: str) -> None:
    op = kernels.op(f"{activation}_and_mul")
    x = kernels.randn(num_tokens, 2 * width)
    expected = reference.act_and_mul(x, activation)
    kernels.close(op(x), expected, f"{activation}_and_mul gates the second half by the first")


@pytest.mark.parametrize("vocab_start", [0, 100])
def test_embedding(kernels: Kernels, vocab_start: int) -> None:
    op = kernels.op("embedding")
    weight = kernels.randn(50, 96)
    ids = kernels.int32(0, 99, 100, 149, 150, 49, 50, 120, 120, 1)
    expected = reference.embedding(ids, weight, vocab_start)
    rule = "embedding looks up its own rows and gives zeros for others"
    kernels.close(op(ids, weight, vocab_start), expected, rule)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (2, 128), (8, 96)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_store_kv(kernels: Kernels, num_tokens: int, num_kv_heads: int, head_dim: int) -> None:
    op = kernels.op("store_kv")
    qkv = kernels.randn(num_tokens, 3 * num_kv_heads, head_dim)
    k, v = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]
    pools = [kernels.randn(200, num_kv_heads, head_dim) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    out_loc = slots(kernels, num_tokens)
    for pool, rows in zip(expected, (k, v), strict=True):
        pool[out_loc] = rows
    op(k, v, *pools, out_loc)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool, wanted), "store_kv writes its slots exactly, and no others"


def slots(kernels: Kernels, num_tokens: int, num_slots: int = 200) -> Tensor:
    """Choose distinct slots, ``[num_tokens]`` int64."""
    chosen = torch.randperm(num_slots, generator=kernels.random)[:num_tokens]
    return chosen.to(kernels.device)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (6, 1, 128)])
def test_qk_norm_rope_store(
    kernels: Kernels,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
    has_norm: bool,
) -> None:
    op = kernels.op("qk_norm_rope_store")
    qkv = kernels.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    q_norm, k_norm = (kernels.randn(head_dim) if has_norm else None for _ in range(2))
    pools = [kernels.randn(200, num_kv_heads, head_dim) for _ in range(2)]
    inputs = QKVInputs(
        num_qo_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=EPS,
        positions=kernels.int32(*range(7, 7 + num_tokens)),
        cos_sin_cache=cos_sin_cache(kernels, head_dim),
        k_pool=pools[0].clone(),
        v_pool=pools[1].clone(),
        out_loc=slots(kernels, num_tokens),
    )
    q, k, v = rotated_parts(qkv, inputs)
    kernels.close(op(qkv.clone(), inputs), q, "qk_norm_rope_store returns the rotated q")
    for pool, rows in ((pools[0], k), (pools[1], v)):
        pool[inputs.out_loc] = rows.to(kernels.dtype)
    kernels.close(inputs.k_pool, pools[0].double(), "qk_norm_rope_store stores the rotated k")
    assert torch.equal(inputs.v_pool, pools[1]), "qk_norm_rope_store stores v as it is"


def rotated_parts(qkv: Tensor, inputs: QKVInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k after norm and rotation, and v; float64."""
    heads = qkv.double().view(len(qkv), -1, inputs.head_dim)
    num_heads, num_kv_heads = inputs.num_qo_heads, inputs.num_kv_heads
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if inputs.q_norm is not None and inputs.k_norm is not None:
        q = reference.rms_norm(q, inputs.q_norm, inputs.eps)
        k = reference.rms_norm(k, inputs.k_norm, inputs.eps)
    q = reference.rope(q, inputs.positions, inputs.cos_sin_cache)
    return q, reference.rope(k, inputs.positions, inputs.cos_sin_cache), v


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 48), (576, 1536), (96, 1)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_pack_linear(
    kernels: Kernels, num_tokens: int, in_features: int, out_features: int, has_bias: bool
) -> None:
    pack = kernels.op("pack_linear")
    weight = kernels.randn(out_features, in_features, scale=in_features**-0.5)
    bias = kernels.randn(out_features) if has_bias else None
    x = kernels.randn(num_tokens, in_features)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    packed = pack(weight, bias)
    if not packed.is_original_needed:
        weight.fill_(float("nan"))
    kernels.close(
        packed(x), expected, "pack_linear gives a weight that multiplies like the original"
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 48), (576, 1536)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_pack_gated_linear(
    kernels: Kernels, num_tokens: int, in_features: int, out_features: int, activation: str,
    has_bias: bool,
) -> None:  # fmt: skip
    pack = kernels.op("pack_gated_linear")
    weight = kernels.randn(2 * out_features, in_features, scale=in_features**-0.5)
    bias = kernels.randn(2 * out_features) if has_bias else None
    x = kernels.randn(num_tokens, in_features)
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    expected = reference.act_and_mul(product, activation)
    packed = pack(weight, bias, activation)
    if not packed.is_original_needed:
        weight.fill_(float("nan"))
    kernels.close(
        packed(x), expected, "pack_gated_linear gives what the activation makes of the product"
    )


NO_ROWS: Mapping[str, Callable[[Callable[..., Any], Kernels], Tensor]] = {  # Any: as above
    "rms_norm": lambda op, k: op(k.randn(0, 64), k.randn(64), EPS),
    "fused_add_rms_norm": lambda op, k: op(k.randn(0, 64), k.randn(0, 64), k.randn(64), EPS)[0],
    "silu_and_mul": lambda op, k: op(k.randn(0, 128)),
    "gelu_and_mul": lambda op, k: op(k.randn(0, 128)),
    "gelu_tanh_and_mul": lambda op, k: op(k.randn(0, 128)),
    "pack_linear": lambda op, k: op(k.randn(64, 96), None)(k.randn(0, 96)),
    "pack_gated_linear": lambda op, k: op(k.randn(128, 96), None, "silu")(k.randn(0, 96)),
}
"""What a model calls behind its last attention, for a chunk of a prompt that samples nothing."""


@pytest.mark.parametrize("name", NO_ROWS)
def test_no_row_at_all(kernels: Kernels, name: str) -> None:
    y = NO_ROWS[name](kernels.op(name), kernels)
    assert y.shape == (0, 64), f"{name} of no rows gives no rows"


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul", "embedding"])
def test_an_op_can_be_captured(kernels: Kernels, name: str) -> None:
    op = kernels.op(name)
    fixed = kernels.int32(1, 2, 3, 4) if name == "embedding" else kernels.randn(4, 64)
    extra = {
        "rms_norm": (kernels.randn(64), EPS),
        "embedding": (kernels.randn(50, 64), 0),
    }.get(name, ())
    graph = CapturedStep(lambda: op(fixed, *extra), kernels.device)
    fixed.copy_(fixed.flip(0))
    expected = op(fixed, *extra).double()
    kernels.close(graph.replay(), expected, f"{name} replayed computes what is in the inputs now")
