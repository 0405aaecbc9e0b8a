from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as QType
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from minisgl.errors import ModelError
from minisgl.weights.contract import SourceConfig, WeightReader
from minisgl.weights.gguf import GGUFFiles, GGUFSource
from tests.core.weights.gguf_writer import save_gguf, save_model_as_gguf
from tests.tiny_models import ARCHITECTURES, TinyModel, build_tiny_model, build_tokenizer


def read_all(reader: WeightReader) -> dict[str, torch.Tensor]:
    return {name: reader.read(name, whole(reader, name)) for name in reader.names()}


def whole(reader: WeightReader, name: str) -> tuple[slice, ...]:
    return (slice(None),) * len(reader.shape(name))


def reference_logits(config: dict[str, Any], folder: Path) -> torch.Tensor:
    """Load the weights of a folder under another configuration and compute a few logits."""
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(5, 105)[None]).logits
    return logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_gguf_file_holds_the_weights_under_their_hugging_face_names(
    tmp_path: Path, arch: str, is_tied: bool
) -> None:
    model = build_tiny_model(TinyModel(arch=arch, is_tied=is_tied))
    expected = save_model_as_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", model)
    files = GGUFFiles(tmp_path / "tiny.gguf")
    found = read_all(files.open_weights())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_gguf_file_describes_the_same_model(tmp_path: Path, arch: str) -> None:
    spec = TinyModel(arch=arch, num_heads=6, num_kv_heads=2, hidden_size=96)
    if arch == "qwen3_moe":  # llama.cpp has no other kind
        spec = TinyModel(arch=arch, extra={"norm_topk_prob": True})
    model = build_tiny_model(spec)
    save_model_as_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", model)
    config = GGUFFiles(tmp_path / "tiny.gguf").config
    with torch.no_grad():
        expected = model(torch.arange(5, 105)[None]).logits
    # float32, same operations: only the rounding of the rope table may differ
    torch.testing.assert_close(
        reference_logits(config, tmp_path / "hf"), expected, atol=1e-5, rtol=0
    )


def llama3_factors(head_dim: int, original: int) -> np.ndarray:
    """Make the factors that llama.cpp's converter writes for rope of factor 4, low 1, high 4."""
    frequencies = 1.0 / 10000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    smooth = (original / wavelengths - 1.0) / (4.0 - 1.0)
    factors = 1 / ((1 - smooth) / 4.0 + smooth)
    factors[wavelengths < original / 4.0] = 1.0
    factors[wavelengths > original / 1.0] = 4.0
    return factors.astype(np.float32)


ROPE_METADATA: dict[str, dict[str, Any]] = {
    "linear": {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0},
    "yarn": {
        "ARCH.rope.scaling.type": "yarn",
        "ARCH.rope.scaling.factor": 4.0,
        "ARCH.rope.scaling.original_context_length": 64,
    },
    "llama3": {},
    "longrope": {"ARCH.rope.scaling.original_context_length": 64},
}


@pytest.mark.parametrize("kind", sorted(ROPE_METADATA))
def test_rope_scaling_of_a_gguf_file_is_that_of_the_model(tmp_path: Path, kind: str) -> None:
    model = build_tiny_model(TinyModel(rope=kind))
    weights = save_model_as_gguf(tmp_path / "unused.gguf", tmp_path / "hf", model)
    rope_tensors: dict[str, tuple[np.ndarray, None]] = {}
    if kind == "llama3":
        rope_tensors["rope_freqs.weight"] = (llama3_factors(16, 64), None)
    if kind == "longrope":
        rope = model.config.rope_parameters
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            rope_tensors[f"rope_factors_{name}.weight"] = (factors, None)
    path = tmp_path / "tiny.gguf"
    extra = ROPE_METADATA[kind]
    save_gguf(path, model.config.to_dict(), weights, extra=extra, raw_tensors=dict(rope_tensors))
    files = GGUFFiles(path)
    assert set(read_all(files.open_weights())) == set(weights)
    with torch.no_grad():
        expected = model(torch.arange(5, 105)[None]).logits
    # the factors went through float32 once more than in the original
    torch.testing.assert_close(
        reference_logits(files.config, tmp_path / "hf"), expected, atol=1e-4, rtol=0
    )


def test_parts_of_a_permuted_projection_are_the_parts_of_the_whole(tmp_path: Path) -> None:
    model = build_tiny_model(TinyModel(num_heads=4, num_kv_heads=2))
    weights = save_model_as_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", model)
    reader = GGUFFiles(tmp_path / "tiny.gguf").open_weights()
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        for index in ((slice(32, 64), slice(None)), (slice(3, 9), slice(8, 40))):
            assert torch.equal(reader.read(name, index), weights[name][index]), (name, index)


def test_one_expert_is_read_from_the_stack_of_all(tmp_path: Path) -> None:
    model = build_tiny_model(TinyModel(arch="mixtral"))
    weights = save_model_as_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", model)
    reader = GGUFFiles(tmp_path / "tiny.gguf").open_weights()
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    index = (slice(None), slice(48, 96))
    assert torch.equal(reader.read(name, index), weights[name][index])


@pytest.mark.parametrize(
    "qtype", [QType.Q8_0, QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1, QType.F16, QType.BF16]
)
def test_quantised_weights_read_like_the_gguf_package_reads_them(
    tmp_path: Path, qtype: QType
) -> None:
    model = build_tiny_model(TinyModel(arch="qwen2"))
    path = tmp_path / "tiny.gguf"
    save_model_as_gguf(path, tmp_path / "hf", model, qtype=qtype)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = (
        GGUFFiles(path)
        .open_weights()
        .read("model.layers.0.mlp.up_proj.weight", (slice(5, 70), slice(None)))
    )
    tensor = stored["blk.0.ffn_up.weight"]
    assert tensor.tensor_type == qtype
    expected = gguf.dequantize(tensor.data, qtype)[5:70]
    assert np.array_equal(found.float().numpy(), expected)


@pytest.mark.parametrize("qtype", [QType.Q2_K, QType.Q4_K, QType.Q6_K, QType.IQ4_NL, QType.IQ2_XS])
def test_types_that_only_llama_cpp_can_write_are_read_too(tmp_path: Path, qtype: QType) -> None:
    model = build_tiny_model(TinyModel(hidden_size=256, num_layers=1))
    weights = save_model_as_gguf(tmp_path / "plain.gguf", tmp_path / "hf", model)
    block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(0).integers(0, 60, (331, 256 // block * block_bytes), np.uint8)
    path = tmp_path / "tiny.gguf"
    save_gguf(
        path, model.config.to_dict(), weights, raw_tensors={"token_embd.weight": (raw, qtype)}
    )
    found = (
        GGUFFiles(path)
        .open_weights()
        .read("model.embed_tokens.weight", (slice(10, 20), slice(None)))
    )
    assert np.array_equal(found.numpy(), gguf.dequantize(raw, qtype)[10:20], equal_nan=True)


def test_weights_equal_those_that_transformers_reads_from_the_same_file(tmp_path: Path) -> None:
    model = build_tiny_model(TinyModel(num_heads=7, num_kv_heads=1, head_dim=16, hidden_size=112))
    path = tmp_path / "tiny.gguf"
    save_model_as_gguf(
        path, tmp_path / "hf", model, qtype=QType.Q4_1, tokenizer=build_tokenizer(),
        extra={"general.name": "tiny", "ARCH.attention.key_length": 16},
    )  # fmt: skip
    assert isinstance(model, LlamaForCausalLM)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = read_all(GGUFFiles(path).open_weights())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_biases_of_llama_projections_are_put_in_order_too(tmp_path: Path) -> None:
    model = build_tiny_model(TinyModel(extra={"attention_bias": True, "mlp_bias": True}))
    expected = save_model_as_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", model)
    files = GGUFFiles(tmp_path / "tiny.gguf")
    assert files.config["attention_bias"]
    assert files.config["mlp_bias"]
    found = read_all(files.open_weights())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_part_of_a_permuted_bias_is_the_part_of_the_whole(tmp_path: Path) -> None:
    model = build_tiny_model(TinyModel(extra={"attention_bias": True}))
    expected = save_model_as_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", model)
    reader = GGUFFiles(tmp_path / "tiny.gguf").open_weights()
    name = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(reader.read(name, (slice(16, 32),)), expected[name][16:32])


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba' is not supported; supported: llama, qwen2"):
        GGUFFiles(path)


def test_a_missing_file_is_an_error_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    source = GGUFSource(SourceConfig())
    assert source.accepts(str(tmp_path / "none.gguf"))
    with pytest.raises(ModelError, match=r"none\.gguf: no such file; looked in /"):
        source.open(str(tmp_path / "none.gguf"))


def test_every_end_token_of_the_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = build_tiny_model(TinyModel())
    save_model_as_gguf(
        path, tmp_path / "hf", model, tokenizer=build_tokenizer(),
        extra={"tokenizer.ggml.eot_token_id": 7},
    )  # fmt: skip
    # 2 is the EOS, 7 ends a turn, 4 is a control token called <|im_end|>
    assert GGUFFiles(path).generation_config["eos_token_id"] == [2, 7, 4]
