from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerBase

from minisgl.errors import ModelError
from minisgl.weights.gguf_file import GGUFFile
from minisgl.weights.gguf_tokenizer import build_gguf_tokenizer
from tests.tiny_models import CHATML_TEMPLATE, build_tokenizer

TEXTS = (
    "The capital of France is Paris.",
    "don't WE'LL 1234 x=42² 3.14",
    "  two spaces\n\n\ttab \r\n",
    "héllo wörld 你好，世界 🙂👍🏽 こんにちは",
    "a<|im_end|>b <|bos|>",
    "",
)


def write_metadata(path: Path, values: dict[str, Any]) -> Path:
    """Write a file with tokenizer keys only."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        full = (
            f"tokenizer.ggml.{key}" if not key.startswith("chat_template") else f"tokenizer.{key}"
        )
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_keys(**changes: Any) -> dict[str, Any]:
    """Describe the tiny tokenizer as llama.cpp's converter would."""
    tokenizer = build_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if i < 5 else 1 for i in range(len(tokens))],
        "merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
        "chat_template": CHATML_TEMPLATE,
    }
    return {key: value for key, value in (keys | changes).items() if value is not None}


def build(path: Path, keys: dict[str, Any]) -> PreTrainedTokenizerBase:
    return build_gguf_tokenizer(GGUFFile(write_metadata(path / "tokenizer.gguf", keys)))


def test_a_byte_level_tokenizer_encodes_and_decodes_like_the_original(tmp_path: Path) -> None:
    ours, theirs = build(tmp_path, byte_level_keys()), build_tokenizer()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)) == text


def test_special_tokens_and_template_are_those_of_the_file(tmp_path: Path) -> None:
    ours, theirs = build(tmp_path, byte_level_keys()), build_tokenizer()
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|bos|>", "<|eos|>", "<|pad|>")
    chat = [{"role": "user", "content": "The capital"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    assert ours.decode([1, 70, 4], skip_special_tokens=True) == theirs.decode([70])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [None, None]),
        ({"add_bos_token": True}, [1, None]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 2]),
        ({"pre": "llama-bpe"}, [1, None]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [None, None]),
    ],
)
def test_begin_and_end_tokens_are_added_where_the_file_says_so(
    tmp_path: Path, flags: dict[str, Any], expected: list[int | None]
) -> None:
    tokenizer = build(tmp_path, byte_level_keys(**flags))
    plain = tokenizer.encode("a", add_special_tokens=False)
    bos, eos = ([token] if token is not None else [] for token in expected)
    assert tokenizer.encode("a") == [*bos, *plain, *eos]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'ll", "Ġpay", "Ġ1234", "Ġ$$", "Ġ", "Ġnow"]),
        ("smollm", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġ$$", "Ġ", "Ġnow"]),
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "123", "4", "Ġ$$", "Ġ", "Ġnow"]),
        ("qwen2", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġ$$", "Ġ", "Ġnow"]),
        ("tekken", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġ$$", "Ġ", "Ġnow"]),
    ],
)
def test_text_is_cut_as_the_named_pre_tokenizer_cuts_it(
    tmp_path: Path, pre: str, words: list[str]
) -> None:
    tokenizer = build(tmp_path, byte_level_keys(pre=pre))
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 1234 $$  now")
    assert [word for word, _ in cut] == words


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_upper_case_contractions_are_words_of_their_own(tmp_path: Path, pre: str) -> None:
    tokenizer = build(tmp_path, byte_level_keys(pre=pre))
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("WE'LL")
    assert [word for word, _ in cut] == ["WE", "'LL"]


def test_qwen2_text_is_composed_first(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, byte_level_keys(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'martian' is not known; known: "):
        build(tmp_path, byte_level_keys(pre="martian"))


def test_a_missing_pre_tokenizer_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        build(tmp_path, byte_level_keys(pre=None))
    assert "names no pre-tokenizer" in caplog.text


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no tokenizer"):
        build(tmp_path, {"model": "gpt2"})


def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model 'bert'; known: gpt2, llama"):
        build(tmp_path, {"model": "bert", "tokens": ["a"]})


def test_a_special_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="eos_token_id 999: the vocabulary has 320 tokens"):
        build(tmp_path, byte_level_keys(eos_token_id=999))


def test_user_defined_tokens_are_whole_but_not_special(tmp_path: Path) -> None:
    kinds = [3 if i < 4 else 1 for i in range(320)]
    kinds[4] = 4
    tokenizer = build(tmp_path, byte_level_keys(token_type=kinds))
    assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), 4]
    assert tokenizer.decode([4], skip_special_tokens=True) == "<|im_end|>"


def test_several_chat_templates_keep_their_names(tmp_path: Path) -> None:
    keys = byte_level_keys(**{"chat_template": "plain", "chat_template.tool_use": "tools"})
    tokenizer = build(tmp_path, keys)
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}


def sentencepiece_like() -> Tokenizer:
    """Train a tokenizer that works as Llama 2's does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    special = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")]
    raw_bytes = [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=[*special, *raw_bytes]
    )
    corpus = ["the capital of france is paris", "def fibonacci(n): return n", "two  spaces", "café"]
    tokenizer.train_from_iterator(corpus * 3, trainer)
    # The trainer can only give byte tokens their ids by adding them, which a real model does not.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(content))


def sentencepiece_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe it with scores, as files of this kind have no merges."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    rank = {left + right: -float(i) for i, (left, right) in reversed(list(enumerate(pairs)))}
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [rank.get(token, -1e6) for token in tokens],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def test_a_sentencepiece_tokenizer_encodes_and_decodes_like_the_original(tmp_path: Path) -> None:
    original = sentencepiece_like()
    ours = build(tmp_path, sentencepiece_keys(original))
    for text in ("the capital of paris", "  two  spaces ", "café 你好 🙂", "fib(n)\n return", "x"):
        assert ours.encode(text) == [1, *original.encode(text).ids], text
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text


def test_a_sentencepiece_tokenizer_can_do_without_the_leading_space(tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece_like()) | {"add_space_prefix": False}
    tokenizer = build(tmp_path, keys)
    assert tokenizer.tokenize("the")[0][0] != "\u2581"
    assert tokenizer.decode(tokenizer.encode(" the"), skip_special_tokens=True) == " the"


def test_a_sentencepiece_file_without_scores_is_refused(tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece_like())
    del keys["scores"]
    with pytest.raises(ModelError, match=r"holds no tokenizer\.ggml\.scores"):
        build(tmp_path, keys)
