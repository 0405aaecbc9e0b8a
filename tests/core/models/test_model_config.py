from __future__ import annotations

from typing import Any

import pytest

from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig, normalize_config
from tests.tiny_models import ARCHITECTURES, TinyModel, hf_config

BASE: dict[str, Any] = {  # a config.json
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def config_with(**fields: Any) -> ModelConfig:
    return normalize_config(BASE | fields)


def qwen2_with(**fields: Any) -> ModelConfig:
    return config_with(architectures=["Qwen2ForCausalLM"], **fields)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_saved_configuration_is_read_as_transformers_means_it(arch: str) -> None:
    saved = hf_config(TinyModel(arch, head_dim=32))
    config = normalize_config(saved.to_dict())
    assert config.num_kv_heads == saved.num_key_value_heads
    assert config.head_dim == (getattr(saved, "head_dim", None) or 16)
    assert config.rms_norm_eps == saved.rms_norm_eps
    assert config.context_len == saved.max_position_embeddings
    assert config.eos_token_ids == (2,)


def test_the_head_size_is_derived_only_when_it_is_not_given() -> None:
    assert config_with().head_dim == 16
    assert config_with(head_dim=None).head_dim == 16
    assert config_with(head_dim=40).head_dim == 40


def test_kv_heads_default_to_the_query_heads_in_llama() -> None:
    fields = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert normalize_config(fields).num_kv_heads == 4


def test_biases_are_those_that_the_hugging_face_class_has() -> None:
    llama = config_with(attention_bias=True, mlp_bias=True)
    assert (llama.has_qkv_bias, llama.has_o_bias, llama.has_mlp_bias) == (True, True, True)
    qwen2 = qwen2_with(attention_bias=False, mlp_bias=True)
    assert (qwen2.has_qkv_bias, qwen2.has_o_bias, qwen2.has_mlp_bias) == (True, False, False)
    qwen3 = config_with(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.has_qkv_bias, qwen3.has_qk_norm) == (False, True)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, (None,) * 4),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
        ({"use_sliding_window": True}, (4096,) * 4),
        ({"sliding_window": None, "use_sliding_window": True}, (None,) * 4),
    ],
)
def test_windows_of_qwen2_follow_flag_and_layers(
    fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert qwen2_with(**({"max_window_layers": 0} | fields)).windows == windows


def test_mistral_has_a_window_unless_its_configuration_says_null() -> None:
    architectures = ["MistralForCausalLM"]
    assert config_with(architectures=architectures).windows == (4096,) * 4
    assert config_with(architectures=architectures, sliding_window=None).windows == (None,) * 4
    assert config_with(architectures=architectures, sliding_window=16).windows == (16,) * 4


def test_llama_never_has_a_window() -> None:
    assert config_with(sliding_window=16, use_sliding_window=True).windows == (None,) * 4


def test_experts_of_qwen3_are_in_the_layers_that_the_step_names() -> None:
    config = config_with(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    )
    assert config.moe is not None
    assert config.moe.is_sparse == (False, True, False, False)
    assert (config.moe.num_experts, config.moe.top_k, config.moe.intermediate_size) == (8, 2, 48)
    assert not config.moe.is_renormalized


def test_the_model_type_stands_in_for_a_missing_architecture() -> None:
    fields = {key: value for key, value in BASE.items() if key != "architectures"}
    config = normalize_config(fields | {"model_type": "qwen3"})
    assert config.architecture == "Qwen3ForCausalLM"


def test_an_architecture_of_another_distribution_is_read_by_its_options() -> None:
    config = normalize_config(
        BASE | {"architectures": ["NewForCausalLM"], "attention_bias": True, "extra": 1},
        architectures=("NewForCausalLM",),
    )
    assert (config.architecture, config.has_qkv_bias, config.raw["extra"]) == (
        "NewForCausalLM",
        True,
        1,
    )


def test_several_end_tokens_all_count() -> None:
    assert config_with(eos_token_id=[2, 7]).eos_token_ids == (2, 7)
    assert config_with(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantization_config asks for quantised weights \(gptq\)",
        ),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2': must be one of silu"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 must be a multiple of"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"hidden_size": 0}, "hidden_size 0: must be an integer of at least 1"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes': must be true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0: must be a number above 0"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_with(**fields)


def test_unknown_kinds_of_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="layer_types holds 'chunked_attention'"):
        qwen2_with(
            sliding_window=8,
            use_sliding_window=True,
            layer_types=["full_attention", "chunked_attention"] * 2,
        )


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok 9 must not exceed the 8 experts"):
        config_with(architectures=["MixtralForCausalLM"], num_experts_per_tok=9)


def test_experts_with_another_activation_are_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act 'gelu': experts must use silu"):
        config_with(architectures=["MixtralForCausalLM"], hidden_act="gelu")
