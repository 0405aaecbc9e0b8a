"""Logits of tiny random models against Hugging Face, float32 on a CPU.

The tolerance is 1e-4 on logits of about 5: both sides sum in other orders, over a few layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from minisgl.core import Req
from tests.core.models.model_harness import Runner, Sizes
from tests.tiny_models import (
    ARCHITECTURES,
    MOE_ARCHITECTURES,
    ROPE_KINDS,
    TinyModel,
    build_tiny_model,
)

TOLERANCE = 1e-4
PROMPT_LENGTHS = (20, 1, 33, 7)
NUM_DECODED = 4

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {  # fields of TinyModel
    "tied head": ("llama", {"is_tied": True}),
    "attention biases": ("llama", {"extra": {"attention_bias": True}}),
    "mlp biases": ("llama", {"extra": {"mlp_bias": True}}),
    "biases with norms on the heads": ("qwen3", {"extra": {"attention_bias": True}}),
    "seven query heads per kv head": ("qwen2", {"num_heads": 14, "hidden_size": 14 * 16}),
    "one kv head": ("llama", {"num_kv_heads": 1}),
    "as many kv heads as query heads": ("llama", {"num_kv_heads": 4}),
    "wide heads": ("qwen3", {"head_dim": 64}),
    "narrow heads": ("mistral", {"head_dim": 8}),
    "even vocabulary": ("llama", {"vocab_size": 512}),
    "one layer": ("qwen3", {"num_layers": 1}),
    "gelu": ("llama", {"extra": {"hidden_act": "gelu"}}),
    "gelu by tanh": ("llama", {"extra": {"hidden_act": "gelu_pytorch_tanh"}}),
    "window in all layers": ("mistral", {"sliding_window": 6}),
    "window of one token": ("mistral", {"sliding_window": 1}),
    "window in the upper layer": ("qwen2", {"sliding_window": 5}),
    "window in the lower layer": (
        "qwen3",
        {
            "sliding_window": 5,
            "extra": {"layer_types": ["sliding_attention", "full_attention"]},
        },
    ),
    "window with experts": ("qwen3_moe", {"sliding_window": 6}),
    "window in mixtral": ("mixtral", {"sliding_window": 6}),
    "renormalised routing": ("qwen3_moe", {"extra": {"norm_topk_prob": True}}),
    "a dense layer among sparse ones": ("qwen3_moe", {"extra": {"mlp_only_layers": [0]}}),
    "every second layer sparse": ("qwen3_moe", {"extra": {"decoder_sparse_step": 2}}),
    "one expert per token": ("mixtral", {"extra": {"num_experts_per_tok": 1}}),
    "all experts for each token": ("qwen3_moe", {"extra": {"num_experts_per_tok": 4}}),
}


def random_prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_matches(hf_model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """Prefill prompts as one batch, feed fixed tokens in decode steps, compare every step."""
    runner = Runner.of(hf_model)
    sequences = random_prompts(hf_model.config.vocab_size, tuple(n + NUM_DECODED for n in lengths))
    expected = [hf_logits(hf_model, tokens) for tokens in sequences]
    reqs = [runner.add(tokens[:-NUM_DECODED]) for tokens in sequences]
    steps = [runner.prefill(reqs)]
    for i in range(NUM_DECODED):
        steps.append(runner.decode(reqs, [tokens[i - NUM_DECODED] for tokens in sequences]))
    for i, logits in enumerate(steps):
        rows = torch.stack([e[n - 1 + i] for e, n in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(logits, rows, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rope", ROPE_KINDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_matches_with_every_rope(arch: str, rope: str) -> None:
    # Long enough that no sequence here passes the original length of longrope.
    hf_model = build_tiny_model(TinyModel(arch, rope, max_positions=256))
    assert_matches(hf_model, PROMPT_LENGTHS)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_option_matches(feature: str) -> None:
    arch, options = FEATURES[feature]
    assert_matches(build_tiny_model(TinyModel(arch, **options)), PROMPT_LENGTHS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_single_prompt_matches(arch: str) -> None:
    assert_matches(build_tiny_model(TinyModel(arch)), (29,))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(arch: str) -> None:
    hf_model = build_tiny_model(TinyModel(arch, sliding_window=None if arch == "llama" else 6))
    tokens = random_prompts(hf_model.config.vocab_size, (23,))[0]
    runner = Runner.of(hf_model)
    req = runner.add(tokens)
    for _ in range(0, len(tokens), 9):
        logits = runner.prefill([req], num_tokens=9)
    torch.testing.assert_close(logits[0], hf_logits(hf_model, tokens)[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("arch", MOE_ARCHITECTURES)
def test_a_batch_gives_each_request_what_it_gets_alone(arch: str) -> None:
    runner = Runner.of(build_tiny_model(TinyModel(arch)), Sizes(num_reqs=16))
    prompts = random_prompts(331, PROMPT_LENGTHS)
    alone = [runner.prefill([runner.add(tokens)]) for tokens in prompts]
    together = runner.prefill([runner.add(tokens) for tokens in prompts])
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_a_chunk_that_samples_nothing_gives_no_logits() -> None:
    runner = Runner.of(build_tiny_model(TinyModel("qwen3_moe")))
    first, second = (runner.add(tokens) for tokens in random_prompts(331, (8, 8)))
    assert runner.prefill_unsampled([first, second]).shape == (0, 331)


@pytest.mark.parametrize(
    ("rope", "max_positions"), [("dynamic", 16), ("longrope", 64)], ids=["dynamic", "longrope"]
)
def test_decoding_past_the_original_length_matches(rope: str, max_positions: int) -> None:
    hf_model = build_tiny_model(TinyModel("llama", rope, max_positions=max_positions))
    prompt = random_prompts(331, (12,))[0]  # the original length is 16 for both
    generate: Any = hf_model.generate  # typed as a submodule by torch
    expected = generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    runner = Runner.of(hf_model)
    req: Req = runner.add(prompt)
    steps = [runner.prefill([req])]
    for token in expected.sequences[0, len(prompt) : -1].tolist():
        steps.append(runner.decode([req], [token]))
    torch.testing.assert_close(torch.cat(steps), torch.cat(expected.logits), rtol=0, atol=TOLERANCE)
