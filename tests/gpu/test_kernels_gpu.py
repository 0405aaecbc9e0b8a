"""Kernel set ``cuda`` on a GPU, at the sizes that serving sees, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.ops.contract import KernelConfig, QKVInputs, SamplingInputs
from minisgl.ops.sampling import sample
from minisgl_kernels_cuda.backend import CudaKernelSet
from minisgl_kernels_cuda.settings import CudaKernelSettings
from tests.kernels_cuda.reference import (
    BF16,
    F16,
    F32,
    assert_near,
    cos_sin_cache,
    make,
    rms_norm,
    rope,
)  # fmt: skip
from tests.kernels_cuda.sampling_case import logits_of, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = (BF16, F16, F32)
VOCAB = 151_936
Ops = Mapping[str, Callable[..., Any]]  # ops have different signatures


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[torch.dtype, Ops]:
    """The ops of each dtype, compiled afresh."""
    folder: Path = tmp_path_factory.mktemp("compiled")
    settings = CudaKernelSettings(cache_dir=str(folder))
    device = torch.device("cuda", 0)
    return {d: CudaKernelSet(KernelConfig(device, d, settings)).ops() for d in DTYPES}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def gpu(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return make(*shape, dtype=dtype, device="cuda", seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1024), (64, 1024), (4096, 5120), (3, 8192), (5, 16, 128)])
def test_norms_are_near_float64(
    sets: Mapping[torch.dtype, Ops], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, residual = gpu(*shape, dtype=dtype), gpu(*shape, dtype=dtype, seed=1)
    weight, total = gpu(shape[-1], dtype=dtype, seed=2), x + residual
    assert_near(sets[dtype]["rms_norm"](x, weight, 1e-6), rms_norm(x, weight, 1e-6))
    normed, added = sets[dtype]["fused_add_rms_norm"](x, residual, weight, 1e-6)
    assert torch.equal(added, total)
    assert_near(normed, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_activations_are_near_float64(
    sets: Mapping[torch.dtype, Ops], dtype: torch.dtype, rows: int
) -> None:
    x = gpu(rows, 6144, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(sets[dtype]["silu_and_mul"](x), F.silu(gate) * up)
    assert_near(sets[dtype]["gelu_and_mul"](x), F.gelu(gate) * up)
    tanh = F.gelu(gate, approximate="tanh") * up
    assert_near(sets[dtype]["gelu_tanh_and_mul"](x), tanh)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim"),
    [
        (1, (16, 8), 128, 128), (64, (40, 8), 128, 128), (2000, (16, 8), 128, 128),
        (70, (9, 3), 64, 64), (7, (8, 1), 256, 256), (33, (4, 2), 128, 64), (9, (4, 4), 80, 80),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_norm", [True, False])
def test_qkv_stage_is_near_float64(
    sets: Mapping[torch.dtype, Ops], dtype: torch.dtype, tokens: int, heads: tuple[int, int],
    head_dim: int, rotary_dim: int, has_norm: bool,
) -> None:  # fmt: skip
    num_q, num_kv = heads
    qkv = gpu(tokens, (num_q + 2 * num_kv) * head_dim, dtype=dtype)
    k_pool, v_pool = torch.zeros(2, tokens + 5, num_kv, head_dim, dtype=dtype, device="cuda")
    positions = torch.randint(4000, (tokens,), device="cuda", dtype=torch.int32)
    inputs = QKVInputs(
        num_q, num_kv, head_dim,
        gpu(head_dim, dtype=dtype, seed=1) if has_norm else None,
        gpu(head_dim, dtype=dtype, seed=2) if has_norm else None,
        1e-6, positions, cos_sin_cache(4000, rotary_dim, "cuda"), k_pool, v_pool,
        torch.randperm(tokens + 5, device="cuda")[:tokens],
    )  # fmt: skip
    q, k, v = qkv.clone().view(tokens, -1, head_dim).split((num_q, num_kv, num_kv), dim=1)
    if inputs.q_norm is not None and inputs.k_norm is not None:
        q, k = rms_norm(q, inputs.q_norm, 1e-6), rms_norm(k, inputs.k_norm, 1e-6)
    out = sets[dtype]["qk_norm_rope_store"](qkv, inputs)
    assert_near(out, rope(q, positions, inputs.cos_sin_cache), scale=4)
    assert_near(k_pool[inputs.out_loc], rope(k, positions, inputs.cos_sin_cache), scale=4)
    assert torch.equal(v_pool[inputs.out_loc], v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_store_move_rows(sets: Mapping[torch.dtype, Ops], dtype: torch.dtype) -> None:
    weight = gpu(5000, 1024, dtype=dtype)
    ids = torch.randint(-100, 10_000, (777,), device="cuda", dtype=torch.int32)
    local = ids.long() - 2000
    is_ours = (local >= 0) & (local < 5000)
    expected = weight[local.clamp(0, 4999)] * is_ours[:, None]
    assert torch.equal(sets[dtype]["embedding"](ids, weight, 2000), expected)
    rows = gpu(777, 3, 8, 128, dtype=dtype)
    k_pool, v_pool = torch.zeros(2, 900, 8, 128, dtype=dtype, device="cuda")
    slots = torch.randperm(900, device="cuda")[:777]
    sets[dtype]["store_kv"](rows[:, 0], rows[:, 2], k_pool, v_pool, slots)
    assert torch.equal(k_pool[slots], rows[:, 0])
    assert torch.equal(v_pool[slots], rows[:, 2])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024),
        (7168, 5120), (5120, 17_408), (1000, 264), (49_152, 576), (960, 576), (576, 1536),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 2, 8, 13, 16])
def test_products_of_few_rows_are_near_float64(
    sets: Mapping[torch.dtype, Ops], dtype: torch.dtype, shape: tuple[int, int], rows: int
) -> None:
    n, k = shape
    weight, bias = gpu(n, k, dtype=dtype) / 8, gpu(n, dtype=dtype, seed=1)
    packed = sets[dtype]["pack_linear"](weight, bias)
    x = gpu(rows, k, dtype=dtype, seed=2)
    expected = x.double() @ weight.double().t() + bias.double()
    assert_near(packed(x), expected, scale=k**0.5 / 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "filters",
    [
        {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 50}, {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.8, "temperature": 0.7}, {"min_p": 0.05},
        {"top_k": 1000, "top_p": 0.95, "min_p": 0.01}, {"top_k": 1}, {"top_p": 0.0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_tokens_are_those_of_the_torch_sampler(
    sets: Mapping[torch.dtype, Ops], dtype: torch.dtype, filters: dict[str, float], spread: float
) -> None:
    logits = logits_of(32, VOCAB, dtype, spread, "cuda")
    inputs = make_inputs(32, device="cuda", **filters)  # type: ignore[arg-type]  # values of both kinds
    tokens = sets[dtype]["sample"](logits, inputs, False)
    expected = sample(logits.cpu(), SamplingInputs(*(t.cpu() for t in inputs)), False)
    # Exponentials differ in the last bits; a draw that close to a boundary is the next token.
    # A flat row has a boundary every 1 / 152,000, some 100 roundings of a float32 sum.
    num_different = int((tokens.cpu() != expected).sum())
    assert num_different <= (3 if spread < 1 else 1)


def test_a_row_gives_the_same_token_in_any_batch(sets: Mapping[torch.dtype, Ops]) -> None:
    logits = logits_of(200, VOCAB, BF16, device="cuda")
    for filters in ({}, {"top_p": 0.9}, {"top_k": 20}):
        inputs = make_inputs(200, device="cuda", **filters)
        op = sets[BF16]["sample"]
        whole = op(logits, inputs, False)
        order = torch.randperm(200, device="cuda")
        turned = op(logits[order], SamplingInputs(*(t[order] for t in inputs)), False)
        assert torch.equal(whole[order], turned)
        for row in (0, 77):
            alone = SamplingInputs(*(t[row : row + 1] for t in inputs))
            assert torch.equal(op(logits[row : row + 1], alone, False), whole[row : row + 1])


def test_draws_follow_the_weights(sets: Mapping[torch.dtype, Ops]) -> None:
    num_rows = 20_000
    weights = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], device="cuda")
    logits = weights.log().expand(num_rows, -1).contiguous()
    tokens = sets[F32]["sample"](logits, make_inputs(num_rows, device="cuda"), False)
    counts, expected = tokens.bincount(minlength=6), weights * num_rows
    # Chi-square with 5 degrees of freedom: above 20.5 once in a thousand; the seeds are fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5


def test_a_chain_of_ops_is_captured_and_replayed_on_new_inputs(
    sets: Mapping[torch.dtype, Ops],
) -> None:
    ops = sets[BF16]
    weights = [gpu(1024, 1024, dtype=BF16, seed=i) / 32 for i in range(6)]
    packed = [ops["pack_linear"](w, None) for w in weights]
    scale, head = (
        gpu(1024, dtype=BF16, seed=9),
        ops["pack_linear"](gpu(5000, 1024, dtype=BF16), None),
    )
    inputs = make_inputs(4, device="cuda", top_p=0.9)

    def step(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for product in packed:
            x, residual = ops["fused_add_rms_norm"](product(x), residual, scale, 1e-6)
        logits = head(x)
        return logits, ops["sample"](logits, inputs, False)

    x, residual = gpu(4, 1024, dtype=BF16), torch.zeros(4, 1024, dtype=BF16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x, residual)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(x, residual.zero_())
        for seed in range(20):
            new = gpu(4, 1024, dtype=BF16, seed=seed)
            x.copy_(new)
            graph.replay()
            logits, tokens = step(new, torch.zeros_like(residual))
            stream.synchronize()
            assert torch.equal(captured[0], logits)
            assert torch.equal(captured[1], tokens)
