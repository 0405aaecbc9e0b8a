"""Tiny random models through `fused` against Hugging Face, token by token in float32.

In the interpreter where there is no GPU: see ``test_interpreted.py``, which runs this file.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.moe.contract import MoEConfig
from minisgl_moe_triton.backend import FusedMoEBackend
from tests.core.models.model_harness import CPU, Runner
from tests.tiny_models import MOE_ARCHITECTURES, TinyModel, build_tiny_model

PROMPT = [7, 91, 300, 12, 12, 45, 208, 5, 77]
NUM_GENERATED = 5


@pytest.mark.parametrize("arch", MOE_ARCHITECTURES)
def test_greedy_tokens_are_those_of_hugging_face(arch: str) -> None:
    hf_model = build_tiny_model(TinyModel(arch))
    runner = Runner.of(hf_model)
    runner.ctx.moe_backend = FusedMoEBackend(moe_config(hf_model.config))
    req = runner.add(PROMPT)
    tokens = [int(runner.prefill([req])[0].argmax())]
    while len(tokens) < NUM_GENERATED:
        tokens.append(int(runner.decode([req], tokens[-1:])[0].argmax()))
    assert tokens == generate(hf_model)


@pytest.mark.parametrize("arch", MOE_ARCHITECTURES)
def test_a_batch_of_requests_has_the_logits_of_hugging_face(arch: str) -> None:
    hf_model = build_tiny_model(TinyModel(arch))
    runner = Runner.of(hf_model)
    runner.ctx.moe_backend = FusedMoEBackend(moe_config(hf_model.config))
    prompts = [PROMPT, PROMPT[3:], PROMPT[:1]]
    logits = runner.prefill([runner.add(prompt) for prompt in prompts])
    with torch.inference_mode():
        expected = [hf_model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    # Both sum in other orders, over two layers, to logits of about 5.
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=1e-4)


def generate(hf_model: Any) -> list[int]:  # Any: transformers types it as a submodule
    ids = torch.tensor([PROMPT])
    # An end of sequence is a token like all others here.
    out = hf_model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_GENERATED,
        min_new_tokens=NUM_GENERATED,
        eos_token_id=None,
    )
    return [int(token) for token in out[0, len(PROMPT) :]]


def moe_config(hf_config: Any) -> MoEConfig:  # Any: fields depend on the architecture
    is_mixtral = hf_config.model_type == "mixtral"
    return MoEConfig(
        num_experts=hf_config.num_local_experts if is_mixtral else hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        hidden_size=hf_config.hidden_size,
        intermediate_size=(
            hf_config.intermediate_size if is_mixtral else hf_config.moe_intermediate_size
        ),
        is_renormalized=is_mixtral or hf_config.norm_topk_prob,
        dtype=torch.float32,
        device=CPU,
        max_num_tokens=256,
    )
