"""How many characters one token can stand for."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from minisgl.tokenizer.span import TextSpan, text_span

BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
MODEL = models.BPE({**BYTES, "ab": 256, "abab": 257}, [("a", "b"), ("ab", "ab")])
SENTENCEPIECE = normalizers.Sequence(
    [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
)


def span(
    model: models.Model = MODEL,
    normalizer: Normalizer | None = None,
    pre_tokenizer: PreTokenizer | None = None,
    added: AddedToken | None = None,
) -> TextSpan | None:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel()
    if added is not None:
        tokenizer.add_tokens([added])
    return text_span(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_it_is_the_longest_token() -> None:
    assert span() == TextSpan(4)
    assert span(added=AddedToken("<|special|>", special=True)) == TextSpan(11)
    assert span(normalizer=SENTENCEPIECE) == TextSpan(4)


def test_composed_characters_count_in_full() -> None:
    assert span(normalizer=normalizers.NFC()) == TextSpan(16)
    assert len("\u03b1\u0313\u0300\u0345") == 4  # of which NFC makes one


def test_ascii_without_a_token_does_not_count() -> None:
    """As in the demo model, which has none for some control characters."""
    left_out = {letter: i for letter, i in BYTES.items() if letter not in "\u0104\u00f1"}
    found = span(models.BPE(left_out, []))
    assert found == TextSpan(1, lost="\x04")
    assert found.least_tokens("a\x04b\x04\U00040000") == 3
    assert span(models.BPE({k: i for k, i in BYTES.items() if k != "\u0122"}, [])) is None


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.Replace(Regex(" +"), " "),
        normalizers.Replace("  ", " "),
        normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()]),
    ],
)
def test_there_is_none_where_a_normalizer_shortens(normalizer: Normalizer) -> None:
    assert span(normalizer=normalizer) is None


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Split(" ", "removed"),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]),
    ],
)
def test_there_is_none_where_spaces_are_left_out(pre_tokenizer: PreTokenizer) -> None:
    assert span(pre_tokenizer=pre_tokenizer) is None


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0, "?": 1}, "?"),
        models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True),
        models.BPE({"a": 0}, []),
    ],
)
def test_there_is_none_where_unknown_text_costs_nothing(model: models.Model) -> None:
    assert span(model) is None


def test_there_is_none_where_a_token_takes_the_space_beside_it() -> None:
    assert span(added=AddedToken("<end>", rstrip=True)) is None
