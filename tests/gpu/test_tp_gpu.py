"""Tensor parallelism over two GPUs: both communicators, and models cut over ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.completion import Completion
from tests.gpu.comm_gpu_worker import LATE_S, CommTask, run
from tests.tiny_models import TinyModel, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

BACKENDS = {
    "cuda": "minisgl_kernels_cuda.comm:build_communicator",
    "torch": "minisgl.distributed.torch_comm:build_communicator",
}
SIZE = 2
Found = dict[int, dict[str, Any]]


def on_ranks(backend: str, folder: Path, count: int = SIZE, **changes: Any) -> Found:
    """Run one process per GPU and return what each found; ``count`` of them answer."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    meeting = f"file://{folder}/meet"
    tasks = [CommTask(BACKENDS[backend], rank, SIZE, meeting, **changes) for rank in range(SIZE)]
    processes = [spawn.Process(target=run, args=(task, results), daemon=True) for task in tasks]
    for process in processes:
        process.start()
    found: Found = {}
    try:
        while len(found) < count:
            rank, answer = results.get(timeout=120)
            assert "error" not in answer, f"rank {rank} failed:\n{answer['error']}"
            found[rank] = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


@pytest.fixture(scope="module", params=[*BACKENDS])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks of a backend found."""
    return on_ranks(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "what", ["wrong_sums", "wrong_gathers", "wrong_norms", "wrong_replays", "uneven"]
)
def test_collectives_are_right_eagerly_and_in_graphs(found: Found, what: str) -> None:
    assert [not found[rank][what] for rank in range(SIZE)] == [True] * SIZE, found


def test_gpus_of_one_host_have_the_fused_op(tmp_path: Path) -> None:
    found = on_ranks("cuda", tmp_path, dtype=torch.float32)
    assert [found[rank]["has_fused"] for rank in range(SIZE)] == [True] * SIZE
    assert [found[rank]["wrong_replays"] for rank in range(SIZE)] == [0] * SIZE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gpu_does_not_wait_for_a_rank_that_has_died(backend: str, tmp_path: Path) -> None:
    found = on_ranks(backend, tmp_path, count=1, is_lost=True)
    assert "another rank is gone" in found[0]["message"]
    assert found[0]["waited_s"] < LATE_S + 5.0


PROMPTS = ["The capital of", "def f(x):", "a", "List three prime numbers: 2, 3,"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=4)
MODELS = {
    "qwen3": TinyModel("qwen3", hidden_size=256, head_dim=128, num_heads=8, num_kv_heads=2),
    "mixtral": TinyModel("mixtral", hidden_size=256, head_dim=128, num_heads=4, num_kv_heads=2),
}
Generate = Callable[..., list[Completion]]


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Generate:
    """Complete the prompts with a model and settings; each combination once."""
    base = tmp_path_factory.mktemp("models")
    done: dict[tuple[Any, ...], list[Completion]] = {}
    for name, spec in MODELS.items():
        save_tiny_model(base / name, spec)

    def generate(model: str, params: SamplingParams = GREEDY, **settings: Any) -> list[Completion]:
        key = (model, *sorted(settings.items()))
        if key not in done:
            given = {"num_pages": 512, "max_running_req": 8, "cuda_graph_max_bs": 4, **settings}
            with LLM(str(base / model), **given) as llm:
                done[key] = llm.generate(PROMPTS, params)
                llm.check_integrity()
        return done[key]

    return generate


@pytest.mark.parametrize(
    ("model", "comm"), [("qwen3", "cuda"), ("qwen3", "torch"), ("mixtral", "cuda")]
)
def test_two_gpus_say_what_one_does_in_float32(model: str, comm: str, generate: Generate) -> None:
    one = generate(model, dtype="float32")
    two = generate(model, dtype="float32", tp=2, comm=comm)
    assert [c["token_ids"] for c in two] == [c["token_ids"] for c in one]


def test_two_gpus_part_from_one_in_bfloat16_only_where_tokens_are_equally_likely(
    generate: Generate,
) -> None:
    # Each rank rounds its part of a sum to 8 bits of mantissa, 1/256 of logits of up to 8 or so,
    # over two layers with two sums each.
    tolerance = 0.25
    one = generate("qwen3", WITH_LOGPROBS, dtype="bfloat16")
    two = generate("qwen3", WITH_LOGPROBS, dtype="bfloat16", tp=2)
    for a, b in zip(one, two, strict=True):
        pairs = zip(chosen_logprobs(a), chosen_logprobs(b), strict=True)
        for i, (mine, theirs) in enumerate(pairs):
            assert abs(mine - theirs) < tolerance, f"token {i}"
            if a["token_ids"][i] != b["token_ids"][i]:
                break  # from here on they complete different texts


def chosen_logprobs(completion: Completion) -> list[float]:
    """Return the log-probability of each token."""
    assert completion["logprobs"] is not None, "they were asked for"
    return [entry["logprob"] for entry in completion["logprobs"]]
