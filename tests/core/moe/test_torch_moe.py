"""The torch MoE against a loop over tokens in float64.

Tolerances: 1e-5 in float32 and 2e-2 in bfloat16 (8 bits of mantissa through two products), on
results of about 1.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.moe import torch_backend
from minisgl.moe.contract import MoEConfig
from minisgl.moe.torch_backend import TorchMoEBackend, route

HIDDEN, INTERMEDIATE = 24, 20
CPU = torch.device("cpu")


class Layer:
    """Random weights and a backend for them."""

    def __init__(
        self,
        num_experts: int = 8,
        top_k: int = 2,
        is_renormalized: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.generator, self.dtype = generator, dtype
        self.num_experts, self.top_k, self.is_renormalized = num_experts, top_k, is_renormalized
        self.gate_up = self.random(num_experts, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
        self.down = self.random(num_experts, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
        self.backend = TorchMoEBackend(
            MoEConfig(num_experts, top_k, HIDDEN, INTERMEDIATE, is_renormalized, dtype, CPU, 1024)
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def run(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.backend.forward(x, logits, self.gate_up, self.down)

    def expected(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """One token and one expert at a time."""
        y = torch.zeros(x.shape, dtype=torch.float64)
        for token, probabilities in enumerate(logits.double().softmax(dim=-1)):
            chosen = probabilities.argsort(descending=True)[: self.top_k].tolist()
            total = float(probabilities[chosen].sum()) if self.is_renormalized else 1.0
            for expert in chosen:
                gate, up = (self.gate_up[expert].double() @ x[token].double()).chunk(2)
                out = self.down[expert].double() @ (F.silu(gate) * up)
                y[token] += out * float(probabilities[expert]) / total
        return y


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 257])
@pytest.mark.parametrize("is_renormalized", [True, False])
def test_any_number_of_tokens_matches(num_tokens: int, is_renormalized: bool) -> None:
    layer = Layer(is_renormalized=is_renormalized)
    x, logits = layer.random(num_tokens, HIDDEN), layer.random(num_tokens, 8)
    torch.testing.assert_close(
        layer.run(x, logits).double(), layer.expected(x, logits), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_number_of_experts_per_token_matches(top_k: int) -> None:
    layer = Layer(top_k=top_k)
    x, logits = layer.random(9, HIDDEN), layer.random(9, 8)
    torch.testing.assert_close(
        layer.run(x, logits).double(), layer.expected(x, logits), rtol=0, atol=1e-5
    )


def test_all_tokens_on_one_expert_match() -> None:
    layer = Layer(top_k=1)
    x, logits = layer.random(17, HIDDEN), torch.zeros(17, 8)
    logits[:, 5] = 9.0
    torch.testing.assert_close(
        layer.run(x, logits).double(), layer.expected(x, logits), rtol=0, atol=1e-5
    )


def test_bfloat16_follows_float64() -> None:
    layer = Layer(dtype=torch.bfloat16)
    x, logits = layer.random(9, HIDDEN), layer.random(9, 8)
    result = layer.run(x, logits)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), layer.expected(x, logits), rtol=2e-2, atol=2e-2)


def test_no_tokens_give_no_rows() -> None:
    layer = Layer()
    assert layer.run(torch.empty(0, HIDDEN), torch.empty(0, 8)).shape == (0, HIDDEN)


def test_the_input_is_kept() -> None:
    layer = Layer()
    x, logits = layer.random(5, HIDDEN), layer.random(5, 8)
    copies = x.clone(), logits.clone()
    layer.run(x, logits)
    assert torch.equal(x, copies[0])
    assert torch.equal(logits, copies[1])


def test_routing_weights_sum_to_one_only_when_renormalised() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    renormalized, experts = route(logits, 2, is_renormalized=True)
    plain, _ = route(logits, 2, is_renormalized=False)
    assert experts.tolist() == [[0, 1]]
    assert renormalized.sum() == pytest.approx(1.0)
    torch.testing.assert_close(plain, logits.softmax(-1)[:, :2])


def test_the_way_without_synchronisation_computes_the_same() -> None:
    layer = Layer(top_k=3)
    x, logits = layer.random(13, HIDDEN), layer.random(13, 8)
    routed = route(logits, 3, is_renormalized=True)
    dense = torch_backend._all_experts(x, *routed, layer.gate_up, layer.down)
    torch.testing.assert_close(dense, layer.run(x, logits), rtol=0, atol=1e-5)
