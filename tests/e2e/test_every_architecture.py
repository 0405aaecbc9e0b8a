"""Every architecture and rope kind through the whole offline LLM, against Hugging Face, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.offline_harness import Tiny, assert_idle, greedy_params, ids_of, random_prompts
from tests.tiny_models import ARCHITECTURES, ROPE_KINDS, TinyModel

NUM_TOKENS = 32
LENGTHS = (20, 1, 33)

KINDS: dict[str, TinyModel] = {
    "tied head": TinyModel("llama", is_tied=True),
    "untied even vocabulary": TinyModel("qwen3", vocab_size=512),
    "tied head with biases": TinyModel("qwen2", is_tied=True),
    "biases everywhere": TinyModel("llama", extra={"attention_bias": True, "mlp_bias": True}),
    "seven query heads per kv head": TinyModel("qwen2", num_heads=14, hidden_size=14 * 16),
    "head_dim apart from hidden size": TinyModel("qwen3", head_dim=32),
    "window in all layers": TinyModel("mistral", sliding_window=6),
    "window of a page": TinyModel("mistral", sliding_window=4),
    "window in the upper layer": TinyModel("qwen2", sliding_window=5),
    "window with experts": TinyModel("mixtral", sliding_window=6),
    "renormalised routing": TinyModel("qwen3_moe", extra={"norm_topk_prob": True}),
    "dense among sparse layers": TinyModel("qwen3_moe", extra={"mlp_only_layers": [0]}),
    "dynamic rope past its length": TinyModel("llama", "dynamic", max_positions=40),
    "longrope past its length": TinyModel("llama", "longrope", max_positions=160),
}


def assert_same_as_hf(folder: Path, spec: TinyModel, **settings: Any) -> None:
    """Compare single and ragged batch with Hugging Face."""
    model = Tiny.save(folder, spec)
    prompts = random_prompts(LENGTHS)
    expected = model.greedy(prompts, NUM_TOKENS)
    with model.open(max_seq_len_override=80, **settings) as llm:
        batched = llm.generate(prompts, greedy_params(NUM_TOKENS))
        assert ids_of(batched) == expected
        llm.generate([5] * 9, greedy_params(1))
        single = [llm.generate(prompt, greedy_params(NUM_TOKENS))[0] for prompt in prompts]
        assert ids_of(single) == expected
        assert_idle(llm)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_are_those_of_hugging_face(tmp_path: Path, arch: str) -> None:
    assert_same_as_hf(tmp_path, TinyModel(arch))


@pytest.mark.parametrize("rope", ROPE_KINDS)
def test_every_rope_gives_the_tokens_of_hugging_face(tmp_path: Path, rope: str) -> None:
    assert_same_as_hf(tmp_path, TinyModel("llama", rope))


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPE_KINDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_takes_every_rope(tmp_path: Path, arch: str, rope: str) -> None:
    assert_same_as_hf(tmp_path, TinyModel(arch, rope, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_gives_the_tokens_of_hugging_face(tmp_path: Path, kind: str) -> None:
    assert_same_as_hf(tmp_path, KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_without_a_cache_the_tokens_are_the_same(tmp_path: Path, arch: str) -> None:
    assert_same_as_hf(tmp_path, TinyModel(arch), cache="naive", cuda_graph_max_bs=2)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_runs(tmp_path: Path, arch: str) -> None:
    model = Tiny.save(tmp_path, TinyModel(arch))
    prompts = random_prompts(LENGTHS)
    with model.open(dtype="bfloat16") as llm:
        outputs = llm.generate(prompts, greedy_params(8))
        assert [len(ids) for ids in ids_of(outputs)] == [8] * len(prompts)
        assert_idle(llm)
    # Rounding may turn a close choice, but not most first tokens of such wide logits.
    first = [ids[0] for ids in model.greedy(prompts, 1)]
    assert sum(a == ids[0] for a, ids in zip(first, ids_of(outputs), strict=True)) >= 2
