"""The fused MoE on the real GPU, at sizes where every tile and load path is used.

Tolerances are those of the conformance suite, see `minisgl.testing.reference.tolerance`: float32
sums of some hundred terms, and for the half types the rounding of inputs and results.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl.testing.reference import Experts, assert_close
from minisgl_moe_triton.backend import FusedMoEBackend
from minisgl_moe_triton.plan import Step, TileShape
from tests.moe_triton.moe_case import Layer, Sizes, tiled_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RULE = "sums each token's experts"
WIDE = Sizes(32, 4, 512, 384, dtype=torch.bfloat16)


def expected(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    """Compute in float64, one expert at a time; a loop over tokens would take minutes here."""
    weights, chosen = logits.double().softmax(dim=-1).topk(experts.top_k, dim=-1)
    if experts.is_renormalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    result = torch.zeros_like(x, dtype=torch.float64)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ experts.gate_up_weight[expert].double().T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ experts.down_weight[expert].double().T
        result.index_add_(0, token, y * weights[token, choice, None])
    return result


def check(layer: Layer, num_tokens: int) -> None:
    x, logits = layer.randn(num_tokens, layer.sizes.hidden_size), layer.logits(num_tokens)
    out = layer.run(x, logits)
    assert_close(out, expected(x, logits, layer.experts), layer.sizes.dtype, RULE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_number_of_tokens_on_the_gpu(dtype: torch.dtype) -> None:
    layer = Layer(WIDE._replace(dtype=dtype))
    for num_tokens in (1, 2, 7, 64, 257, 1000):
        check(layer, num_tokens)


@pytest.mark.parametrize("block_m", [32, 128])
@pytest.mark.parametrize("has_halves", [True, False])
@pytest.mark.parametrize("has_tma", [True, False])
def test_ways_to_load_on_the_gpu(
    tmp_path: Path, block_m: int, has_tma: bool, has_halves: bool
) -> None:
    tile = TileShape(block_n=64, block_k=64, num_stages=3, group_m=2, has_tma=has_tma)
    # 200 and 328 are no multiples of the tiles: the descriptors' edges are used.
    for sizes in (WIDE, Sizes(8, 3, 328, 200, dtype=torch.bfloat16)):
        backend = tiled_backend(tmp_path, sizes, Step(1 << 30, block_m, tile, tile, has_halves))
        check(Layer(sizes, backend), 300)


def test_the_packages_tiles_for_qwen3_30b_a3b() -> None:
    sizes = Sizes(128, 8, 2048, 768, dtype=torch.bfloat16)
    layer = Layer(sizes, FusedMoEBackend(sizes.config(max_num_tokens=4096)))
    for num_tokens in (200, 4096):
        check(layer, num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 24, 200])
def test_a_captured_layer_serves_any_routing(num_tokens: int) -> None:
    layer = Layer(WIDE)
    x, logits = layer.randn(num_tokens, 512), layer.logits(num_tokens)
    layer.run(x, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(x, logits)
    all_on_some = layer.logits(1).expand(num_tokens, -1)
    for new_logits in (layer.logits(num_tokens), all_on_some):
        x.copy_(layer.randn(num_tokens, 512))
        logits.copy_(new_logits)
        graph.replay()
        assert_close(out, expected(x, logits, layer.experts), torch.bfloat16, RULE)


def test_layers_one_behind_the_other_do_not_disturb_each_other() -> None:
    layer = Layer(WIDE)
    counts = (1, 1, 64, 1, 300, 7) * 4
    inputs = [(layer.randn(n, 512), layer.logits(n)) for n in counts]
    outputs = [layer.run(*each) for each in inputs]  # launches overlap from Hopper on
    for (x, logits), out in zip(inputs, outputs, strict=True):
        assert_close(out, expected(x, logits, layer.experts), torch.bfloat16, RULE)


def test_the_same_inputs_give_the_same_bits() -> None:
    layer = Layer(WIDE)
    x, logits = layer.randn(500, 512), layer.logits(500)
    first = layer.run(x, logits)
    assert all(torch.equal(layer.run(x, logits), first) for _ in range(10))


def test_odd_sizes_on_the_gpu() -> None:
    layer = Layer(Sizes(5, 3, 33, 17))
    for num_tokens in (1, 19, 300):
        check(layer, num_tokens)
