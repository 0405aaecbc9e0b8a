"""Requests on a GPU that want more than the sampler does: penalties, bias, log-probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.completion import Completion
from tests.core.engine.engine_harness import StepDriver, make_engine
from tests.tiny_models import TinyModel, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 24
PROMPTS = [[5, 9, 200, 31], [7] * 11, [300, 12, 4, 4, 18, 90, 66], [8, 8], [40, 41, 42], [9]]
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.4),
    SamplingParams(max_tokens=NUM_TOKENS, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(max_tokens=NUM_TOKENS, logit_bias={17: 6.5, 2: 100.0}, min_tokens=9),
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3),
    SamplingParams(
        max_tokens=NUM_TOKENS, repetition_penalty=0.8, temperature=1.0, seed=6, logprobs=0
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edited") / "tiny"
    save_tiny_model(folder, TinyModel(arch="qwen3", head_dim=128))
    return folder


@contextmanager
def refused_waits() -> Iterator[None]:
    """Let whatever waits for the device raise, but for events."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def generate(model: Path, device: str, **settings: object) -> list[Completion]:
    with LLM(str(model), dtype="float32", device=device, num_pages=512, **settings) as llm:
        return llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("largest_graph", [0, 8])
def test_edited_requests_say_what_they_say_on_a_cpu(model: Path, largest_graph: int) -> None:
    on_cpu = generate(model, "cpu", overlap=False)
    on_gpu = generate(model, "cuda", cuda_graph_max_bs=largest_graph)
    for found, wanted in zip(on_gpu, on_cpu, strict=True):
        assert found["token_ids"] == wanted["token_ids"]
        for a, b in zip(
            found["choices"][0]["logprobs"] or (),
            wanted["choices"][0]["logprobs"] or (),
            strict=True,
        ):
            assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-3)


@pytest.mark.parametrize("attention", ["auto", "fi"])
@pytest.mark.parametrize("largest_graph", [0, 8])
@pytest.mark.parametrize(
    "of", [slice(0, 6), slice(1, 2), slice(4, 5)], ids=["mixed", "penalty", "logprobs"]
)
def test_the_host_waits_for_no_step_that_it_launches(
    model: Path, attention: str, largest_graph: int, of: slice
) -> None:
    # Else the host prepares the next step only when the device has nothing to do.
    engine = make_engine(
        model,
        device="cuda",
        dtype="bfloat16",
        attn=attention,
        cuda_graph_max_bs=largest_graph,
    )
    driver = StepDriver(engine)
    prompts = zip(PROMPTS[of], PARAMS[of], strict=True)
    reqs = [driver.admit(i, prompt, params) for i, (prompt, params) in enumerate(prompts)]
    driver.generate(reqs, 2)  # what is compiled at its first use may wait
    for req in reqs:
        req.cached_len, req.device_len = 0, req.num_tokens
    with refused_waits():
        outputs = [driver.prefill(reqs), driver.decode(reqs), driver.decode(reqs)]
    for output in outputs:
        assert len(output.wait().token_ids) == len(reqs)
