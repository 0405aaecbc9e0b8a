"""How many characters one token can stand for."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from minisgl.tokenizer.span import most_characters_per_token

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
) -> int | None:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel()
    if added is not None:
        tokenizer.add_tokens([added])
    return most_characters_per_token(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_it_is_the_longest_token() -> None:
    assert span() == 4
    assert span(added=AddedToken("<|special|>", special=True)) == 11
    assert span(normalizer=SENTENCEPIECE) == 4


def test_composed_characters_count_in_full() -> None:
    assert span(normalizer=normalizers.NFC()) == 16
    assert len("\u03b1\u0313\u0300\u0345") == 4  # of which NFC makes one


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
