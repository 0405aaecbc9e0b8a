"""Gemma 3 against the contract, and against Hugging Face: the same greedy tokens in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from minisgl import LLM, SamplingParams
from minisgl.errors import ModelError
from minisgl.testing.tiny_checkpoint import write_tiny_checkpoint
from minisgl_model_gemma3.config_json import adapt_config

NUM_TOKENS = 24
WINDOW = 12
PROMPTS = [[5, 17, 200, 31], [9], list(range(40, 90)), list(range(100, 100 + WINDOW))]

Json = dict[str, Any]  # Any: free-form JSON

FIELDS: Json = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 48,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def save_model(folder: Path, **fields: Any) -> PreTrainedModel:  # Any: JSON
    """Write a random checkpoint, and return Hugging Face's model of it."""
    write_tiny_checkpoint(folder)  # for its tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Gemma3TextConfig(**FIELDS, **fields)
        made = Gemma3ForCausalLM._from_config(config, attn_implementation="eager")
        model: PreTrainedModel = made.float().eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, which start at zero and would hide a mistake
                parameter.data = 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generate(folder: Path, **settings: Any) -> list[list[int]]:  # Any: settings of every type
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), num_pages=128, **settings) as llm:
        return [output["token_ids"] for output in llm.generate(PROMPTS, params)]


def write_config(folder: Path, config: Json) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def test_it_conforms(tmp_path: Path) -> None:
    suite = ["--pyargs", "minisgl.testing", "--backend", "model:Gemma3ForCausalLM"]
    command = [sys.executable, "-m", "pytest", "-q", *suite]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": False, "final_logit_softcapping": 20.0},
        {
            "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ],
    ids=["defaults", "untied and capped", "scaled rotation"],
)
def test_greedy_tokens_are_those_of_hugging_face(tmp_path: Path, fields: Json) -> None:
    model = save_model(tmp_path, **fields)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert generate(tmp_path) == expected
    assert generate(tmp_path, max_prefill_length=7, page_size=4) == expected


def test_the_config_of_older_versions_means_the_same(tmp_path: Path) -> None:
    save_model(tmp_path)
    expected = generate(tmp_path)
    older = FIELDS | {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
    }
    write_config(tmp_path, older)
    assert generate(tmp_path) == expected


@pytest.mark.parametrize(
    ("field", "value"), [("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True)]
)
def test_what_gemma_3_does_not_have_is_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"config.json: {field} {value!r} is not supported"):
        adapt_config(FIELDS | {field: value})
