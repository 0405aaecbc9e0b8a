"""What every MoE backend has to do; see `minisgl.moe.contract`.

Results are compared with a float64 loop over tokens; see `reference.tolerance` for the width.
Weights are scaled so that every intermediate value is about 1.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from minisgl.moe.contract import MoEBackend, MoEConfig
from minisgl.testing.captured_step import CapturedStep
from minisgl.testing.reference import Experts, assert_close, moe
from minisgl.testing.selection import TestedBackend
from minisgl.testing.together import run_together

DTYPES = ("float32", "float16", "bfloat16")
MAX_NUM_TOKENS = 128


class Layer(NamedTuple):
    """A backend, its layer and some tokens."""

    backend: MoEBackend
    experts: Experts
    hidden_states: Tensor
    router_logits: Tensor

    def forward(self) -> Tensor:
        """Compute the layer."""
        gate_up, down = self.experts.gate_up_weight, self.experts.down_weight
        return self.backend.forward(self.hidden_states, self.router_logits, gate_up, down)


class Shape(NamedTuple):
    """Sizes of a layer."""

    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    is_renormalized: bool = True


SHAPES = (
    Shape(),
    Shape(is_renormalized=False),
    Shape(num_experts=4, top_k=1),
    Shape(num_experts=16, top_k=8, intermediate_size=32),
    Shape(num_experts=6, top_k=6),
    Shape(num_experts=60, top_k=4, hidden_size=192, intermediate_size=48),
    Shape(num_experts=8, top_k=2, hidden_size=256, intermediate_size=352),
)


def make(
    backend: TestedBackend, num_tokens: int, shape: Shape = SHAPES[0], dtype: str = "float32"
) -> Layer:
    """Build a backend and random tokens; skip a type that its probe refuses."""
    reason = backend.refusal(dtype=dtype)
    if reason:
        pytest.skip(reason)
    device = torch.device(backend.machine.device)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    random = torch.Generator().manual_seed(num_tokens)

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=random) * scale).to(device, torch_dtype)

    hidden, inner, num_experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
    config = MoEConfig(*shape[:4], shape.is_renormalized, torch_dtype, device, MAX_NUM_TOKENS)
    experts = Experts(
        randn(num_experts, 2 * inner, hidden, scale=hidden**-0.5),
        randn(num_experts, hidden, inner, scale=inner**-0.5),
        shape.top_k,
        shape.is_renormalized,
    )
    # A shuffled range per token: no two logits are equal, in any type.
    order = torch.rand(num_tokens, num_experts, generator=random).argsort(dim=1)
    logits = (order * (6 / num_experts) - 3).to(device, torch_dtype)
    made: MoEBackend = backend.build(config)
    return Layer(made, experts, randn(num_tokens, hidden), logits)


def check(layer: Layer) -> None:
    expected = moe(layer.hidden_states, layer.router_logits, layer.experts)
    rule = "forward gives the weighted sum of each token's top_k experts"
    assert_close(layer.forward(), expected, layer.hidden_states.dtype, rule, "moe")


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, MAX_NUM_TOKENS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_tokens(backend: TestedBackend, num_tokens: int, dtype: str) -> None:
    check(make(backend, num_tokens, dtype=dtype))


def test_no_token_at_all(backend: TestedBackend) -> None:
    y = make(backend, 0).forward()
    assert y.shape == (0, SHAPES[0].hidden_size), "forward of no tokens gives no rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:4])))
def test_layer_shapes(backend: TestedBackend, shape: Shape, dtype: str) -> None:
    check(make(backend, 19, shape, dtype))


def test_router_logits_may_have_another_type(backend: TestedBackend) -> None:
    layer = make(backend, 9)
    check(layer._replace(router_logits=layer.router_logits.bfloat16()))


def test_all_tokens_may_choose_the_same_experts(backend: TestedBackend) -> None:
    layer = make(backend, 50)
    layer.router_logits[:] = layer.router_logits[0].clone()
    check(layer)


def test_a_router_may_be_very_sure(backend: TestedBackend) -> None:
    layer = make(backend, 12)
    layer.router_logits.mul_(1000)
    check(layer)


def test_inputs_are_not_changed(backend: TestedBackend) -> None:
    layer = make(backend, 21)
    tensors = (layer.hidden_states, layer.router_logits, *layer.experts[:2])
    before = [tensor.clone() for tensor in tensors]
    layer.forward()
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy), "forward does not change its inputs"


def test_one_backend_serves_layers_and_batches_in_any_order(backend: TestedBackend) -> None:
    layers = [make(backend, num_tokens) for num_tokens in (40, 1, 17, MAX_NUM_TOKENS, 3)]
    shared = layers[0].backend
    outputs = [layer._replace(backend=shared).forward() for layer in layers]
    for layer, output in zip(layers, outputs, strict=True):
        expected = moe(layer.hidden_states, layer.router_logits, layer.experts)
        rule = "a result stays as it is while other layers run"
        assert_close(output, expected, layer.hidden_states.dtype, rule, "moe")


def test_two_backends_share_nothing(backend: TestedBackend) -> None:
    layers = [make(backend, 30), make(backend, 70, SHAPES[3])]
    run_together([partial(check, layer) for layer in layers], "two backends share nothing")


def test_a_captured_step_can_be_replayed(backend: TestedBackend) -> None:
    layer = make(backend, 16)
    graph = CapturedStep(layer.forward, layer.hidden_states.device)
    other = make(backend, 16)
    layer.hidden_states.copy_(other.hidden_states.flip(0))
    layer.router_logits.copy_(other.router_logits.roll(1, 1))
    expected = moe(layer.hidden_states, layer.router_logits, layer.experts)
    rule = "a replay computes what is in the inputs now"
    assert_close(graph.replay(), expected, layer.hidden_states.dtype, rule, "moe")
