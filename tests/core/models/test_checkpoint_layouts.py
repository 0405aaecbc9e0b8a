"""Which checkpoint tensors a model asks for, and which spellings it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minisgl.models.config import normalize_config
from tests.core.models.model_harness import Runner, SingleComm, build_model, torch_kernels
from tests.tiny_models import (
    ARCHITECTURES,
    MOE_ARCHITECTURES,
    TinyModel,
    build_tiny_model,
    save_tiny_model,
)

PROMPT = [5, 17, 300, 4, 9]


def logits_with(config_json: dict[str, object], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    runner = Runner(normalize_config(config_json), weights)
    return runner.prefill([runner.add(PROMPT)])


def unfuse(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Store each expert's projections one by one, as Qwen3-MoE is published."""
    separate = {}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                separate[f"{module}.{i}.gate_proj.weight"] = gate
                separate[f"{module}.{i}.up_proj.weight"] = up
        elif kind == "down_proj":
            for i, down in enumerate(tensor):
                separate[f"{module}.{i}.down_proj.weight"] = down
        else:
            separate[name] = tensor
    return separate


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_files_that_transformers_writes_are_what_a_model_asks_for(
    arch: str, tmp_path: Path
) -> None:
    hf_model = save_tiny_model(tmp_path, TinyModel(arch))
    with torch.inference_mode():
        expected = hf_model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1:]
    weights = load_file(tmp_path / "model.safetensors")
    logits = logits_with(hf_model.config.to_dict(), weights)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_experts_load_alike_fused_and_one_by_one() -> None:
    hf_model = build_tiny_model(TinyModel("qwen3_moe"))
    weights, config = hf_model.state_dict(), hf_model.config.to_dict()
    separate = unfuse(weights)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in separate
    assert torch.equal(logits_with(config, weights), logits_with(config, separate))


def test_experts_of_mixtral_load_under_their_published_names() -> None:
    hf_model = build_tiny_model(TinyModel("mixtral"))
    weights, config = hf_model.state_dict(), hf_model.config.to_dict()
    renamed = {
        name.replace(".mlp.", ".block_sparse_moe.")
        .replace("gate_proj", "w1")
        .replace("up_proj", "w3")
        .replace("down_proj", "w2"): tensor
        for name, tensor in unfuse(weights).items()
    }
    assert "model.layers.1.block_sparse_moe.experts.0.w2.weight" in renamed
    assert torch.equal(logits_with(config, weights), logits_with(config, renamed))


@pytest.mark.parametrize("arch", MOE_ARCHITECTURES)
def test_a_fused_tensor_names_all_that_it_replaces(arch: str) -> None:
    hf_model = build_tiny_model(TinyModel(arch))
    config = normalize_config(hf_model.config.to_dict())
    targets = list(build_model(config, SingleComm(), torch_kernels()).load_targets())
    replaced = {name for _, target in targets for name in target.replaces}
    fused = {name for name, target in targets if target.is_optional and target.dest is not None}
    required = {name for name, target in targets if not target.is_optional}
    assert replaced <= required
    assert fused == {n for n in hf_model.state_dict() if "experts" in n or n not in required}


def test_a_tied_head_skips_a_head_that_is_stored_all_the_same() -> None:
    hf_model = build_tiny_model(TinyModel("llama", is_tied=True))
    weights, config = dict(hf_model.state_dict()), hf_model.config.to_dict()
    without = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    other = weights | {"lm_head.weight": torch.zeros(1)}
    assert torch.equal(logits_with(config, without), logits_with(config, other))


def test_an_untied_head_is_required() -> None:
    hf_model = build_tiny_model(TinyModel("llama"))
    weights = {n: t for n, t in hf_model.state_dict().items() if n != "lm_head.weight"}
    with pytest.raises(AssertionError, match=r"missing: lm_head\.weight"):
        logits_with(hf_model.config.to_dict(), weights)


def test_rotary_frequencies_of_old_checkpoints_are_skipped() -> None:
    hf_model = build_tiny_model(TinyModel("llama"))
    config, weights = hf_model.config.to_dict(), dict(hf_model.state_dict())
    old = weights | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.inv_freq": torch.zeros(8),
    }
    assert torch.equal(logits_with(config, old), logits_with(config, weights))
