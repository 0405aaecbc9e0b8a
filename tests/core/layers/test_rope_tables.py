"""Cosine and sine tables against transformers' own rotary embedding, float32.

Equal up to rounding (1e-6): both compute position times frequency in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.errors import ModelError
from minisgl.layers.rotary import RopeConfig, build_cos_sin_cache
from minisgl.models.config import ModelConfig, normalize_config
from tests.tiny_models import ROPE_KINDS, rope_parameters

HEAD_DIM = 16
MAX_POSITIONS = 64
BASE: dict[str, Any] = {  # a config.json
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
}


def hf_table(rope: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """Return cosines and sines of ``positions`` as one forward pass of transformers sees them."""
    fields = BASE | {"rope_parameters": dict(rope)}
    embedding = LlamaRotaryEmbedding(LlamaConfig(**fields))
    cos, sin = embedding(torch.zeros(1), positions[None])
    half = HEAD_DIM // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def config_with(**fields: Any) -> ModelConfig:
    return normalize_config(BASE | fields)


def original_length(kind: str) -> int:
    return MAX_POSITIONS // 4 if kind == "longrope" else MAX_POSITIONS


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rows_within_the_original_length_equal_those_of_transformers(kind: str) -> None:
    rope = rope_parameters(kind, MAX_POSITIONS, HEAD_DIM)
    positions = torch.arange(original_length(kind))
    table = build_cos_sin_cache(config_with(rope_parameters=rope).rope, len(positions))
    torch.testing.assert_close(table, hf_table(rope, positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rows_past_the_original_length_equal_those_of_transformers(kind: str) -> None:
    rope = rope_parameters(kind, MAX_POSITIONS, HEAD_DIM)
    table = build_cos_sin_cache(config_with(rope_parameters=rope).rope, 4 * MAX_POSITIONS)
    expected = hf_table(rope, torch.arange(4 * MAX_POSITIONS))
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)  # larger angles


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_row_past_the_original_length_is_that_of_a_sequence_that_ends_there(kind: str) -> None:
    rope = rope_parameters(kind, MAX_POSITIONS, HEAD_DIM)
    table = build_cos_sin_cache(config_with(rope_parameters=rope).rope, 4 * MAX_POSITIONS)
    for position in (original_length(kind), 2 * MAX_POSITIONS, 4 * MAX_POSITIONS - 1):
        expected = hf_table(rope, torch.tensor([position]))
        torch.testing.assert_close(table[position : position + 1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 0.9},
        {"beta_fast": 16, "beta_slow": 2},
        {"truncate": False},
    ],
    ids=lambda extra: "+".join(extra),
)
def test_options_of_yarn_count(extra: dict[str, Any]) -> None:
    rope = rope_parameters("yarn", MAX_POSITIONS, HEAD_DIM) | extra
    table = build_cos_sin_cache(config_with(rope_parameters=rope).rope, MAX_POSITIONS)
    expected = hf_table(rope, torch.arange(MAX_POSITIONS))
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)


def test_the_attention_factor_of_longrope_scales_the_table() -> None:
    rope = rope_parameters("longrope", MAX_POSITIONS, HEAD_DIM) | {"attention_factor": 2.0}
    table = build_cos_sin_cache(config_with(rope_parameters=rope).rope, 1)
    assert table[0, : HEAD_DIM // 2].tolist() == [2.0] * (HEAD_DIM // 2)


def test_tables_longer_than_a_block_have_no_seam() -> None:
    config = RopeConfig("dynamic", 10000.0, 8, 8192, {"factor": 2.0})
    table = build_cos_sin_cache(config, 8200)
    assert torch.equal(table[8190:8194], build_cos_sin_cache(config, 8194)[8190:])
    assert (table[8192] != table[8191]).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {"rope_parameters": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ],
)
def test_every_spelling_means_the_same(fields: dict[str, Any]) -> None:
    rope = config_with(**({"rope_theta": 500.0} | fields)).rope
    assert (rope.rope_type, rope.theta, rope.scaling["factor"]) == ("linear", 500.0, 4.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_parameters": {}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
)
def test_the_plain_rotation_has_many_spellings(fields: dict[str, Any]) -> None:
    assert config_with(**fields).rope == RopeConfig("default", 10000.0, HEAD_DIM, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 256),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            64,
        ),
        ({"rope_scaling": rope_parameters("llama3", MAX_POSITIONS, HEAD_DIM)}, 64),
        ({"rope_scaling": rope_parameters("longrope", MAX_POSITIONS, HEAD_DIM)}, 64),
    ],
)
def test_the_context_length_includes_the_scaling(fields: dict[str, Any], length: int) -> None:
    assert config_with(**fields).context_len == length


def test_an_original_length_beside_the_rope_fields_wins() -> None:
    rope = rope_parameters("longrope", MAX_POSITIONS, HEAD_DIM)
    config = config_with(rope_scaling=rope, original_max_position_embeddings=8)
    assert config.rope.original_length == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "zigzag", "factor": 2.0}},
            "rope type 'zigzag' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor 'two': must be a number"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear': must be an object"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor must hold head_dim / 2 = 8 numbers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters differs between layers"),
    ],
)
def test_what_we_cannot_rotate_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_with(**fields)
