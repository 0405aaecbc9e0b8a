from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from minisgl.tokenizer.detokenize import IncrementalDetokenizer
from minisgl.tokenizer.pieces import TokenPieces
from tests.tiny_models import build_tokenizer

TEXTS = (
    "The capital of France is Paris.",
    "  leading and trailing  ",
    "👩‍👩‍👧‍👦 flags 🇫🇷🇮🇹 skin 👍🏽",
    "你好，世界。こんにちは 한국어",
    "e\u0301 combining a\u0308\u0323",
    "tabs\t\r\n\n\nlines",
    "genuine \ufffd and \ufffd\ufffd",
    "",
)

SPACE = "\u2581"
PLAIN = (
    "a",
    "b",
    "\u2581the",
    "\u2581",
    "\u2581\u2581",
    "é",
    "你",
    "\ufffd",
    "\u2581\ufffd",
    "##ing",
)


def small_tokenizer(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """Make a tokenizer of a few words, all bytes and some special tokens, for its decoder."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PLAIN, "<tool>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sentencepiece(num_stripped: int) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if num_stripped:
        steps.append(decoders.Strip(" ", num_stripped, 0))
    return decoders.Sequence(steps)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": build_tokenizer,
    "sentencepiece": lambda: small_tokenizer(sentencepiece(1)),
    "sentencepiece-unstripped": lambda: small_tokenizer(sentencepiece(0)),
    "metaspace": lambda: small_tokenizer(decoders.Metaspace()),
    "wordpiece": lambda: small_tokenizer(decoders.WordPiece(cleanup=False)),
}


@cache
def tokenizer_of(kind: str) -> tuple[PreTrainedTokenizerFast, TokenPieces]:
    tokenizer = MAKERS[kind]()
    return tokenizer, TokenPieces(tokenizer)


def decode_at_once(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], skip_special_tokens: bool = True
) -> str:
    text = tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def id_of(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_none_has_half_a_character(text: str) -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    shown = stream(IncrementalDetokenizer(pieces), tokenizer.encode(text))
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", sorted(MAKERS))
@settings(deadline=None)  # machines differ
@given(data=st.data())
def test_random_tokens_give_the_text_that_decoding_at_once_gives(
    kind: str, skip_special_tokens: bool, data: st.DataObject
) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    num_ids = len(tokenizer)
    # bytes, words and special tokens, and ids that a padded vocabulary has beyond the tokenizer's
    ids = data.draw(st.lists(st.integers(0, num_ids + 3), max_size=40))
    if kind in ("metaspace", "wordpiece"):  # byte tokens are plain words there
        ids = [i for i in ids if i < num_ids]
    shown = stream(IncrementalDetokenizer(pieces, skip_special_tokens), ids)
    assert "".join(shown) == decode_at_once(tokenizer, ids, skip_special_tokens)
    assert pieces.decode(ids, skip_special_tokens) == "".join(shown)


@settings(deadline=None)  # machines differ
@given(st.text(max_size=12))
def test_byte_tokens_give_every_text(text: str) -> None:
    for kind in ("byte-level", "sentencepiece-unstripped"):
        tokenizer, pieces = tokenizer_of(kind)
        if kind == "byte-level":
            ids = tokenizer.encode(text)
        else:
            ids = [3 + byte for byte in text.encode()]
        assert "".join(stream(IncrementalDetokenizer(pieces), ids)) == text


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    ids = tokenizer.encode("x🙂")
    assert len(ids) > 2  # the emoji is cut into several tokens
    assert stream(IncrementalDetokenizer(pieces), ids) == ["x", *[""] * (len(ids) - 2), "🙂", ""]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_an_unfinished_character_is_flushed_at_the_end(kind: str) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    ids = tokenizer.encode("🙂")[:1] if kind == "byte-level" else [3 + 0xF0]
    assert stream(IncrementalDetokenizer(pieces), ids) == ["", "\ufffd"]


def test_a_word_after_an_unfinished_character_is_not_lost() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    ids = [*tokenizer.encode("🙂")[:1], *tokenizer.encode(" Paris")]
    assert "".join(stream(IncrementalDetokenizer(pieces), ids)) == "\ufffd Paris"


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_a_genuine_replacement_character_is_shown(kind: str) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    ids = [id_of(tokenizer, token) for token in ("a", "\ufffd", "b")]
    assert "".join(stream(IncrementalDetokenizer(pieces), ids)) == "a\ufffdb"


def test_spaces_between_words_of_a_stripping_decoder_stay() -> None:
    for kind in ("sentencepiece", "metaspace"):
        tokenizer, pieces = tokenizer_of(kind)
        word = id_of(tokenizer, "\u2581the")
        assert "".join(stream(IncrementalDetokenizer(pieces), [word] * 3)) == "the the the", kind


def test_a_first_token_whose_space_is_stripped_still_comes_first() -> None:
    tokenizer, pieces = tokenizer_of("metaspace")
    ids = [id_of(tokenizer, SPACE), id_of(tokenizer, f"{SPACE}the")]
    assert "".join(stream(IncrementalDetokenizer(pieces), ids)) == " the"


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    ids = [*tokenizer.encode("Paris"), 4, *tokenizer.encode("!")]
    assert "".join(stream(IncrementalDetokenizer(pieces), ids)) == "Paris!"
    shown = stream(IncrementalDetokenizer(pieces, skip_special_tokens=False), ids)
    assert "".join(shown) == "Paris<|im_end|>!"


def test_several_tokens_can_be_pushed_at_once() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    ids = tokenizer.encode("Paris 🙂!")
    detokenizer = IncrementalDetokenizer(pieces)
    assert detokenizer.push(ids[:3]) + detokenizer.push(ids[3:]) == "Paris 🙂!"


def test_a_stop_string_over_tokens_ends_the_text() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    ids = tokenizer.encode("The capital of France is Paris. The end")
    detokenizer = IncrementalDetokenizer(pieces, stop=["s Paris", "zzz"])
    shown = []
    for token_id in ids:
        shown.append(detokenizer.push([token_id]))
        if detokenizer.stop_reason is not None:
            break
    assert "".join(shown) + detokenizer.finish() == "The capital of France i"
    assert detokenizer.stop_reason == "s Paris"
    assert detokenizer.push(ids) == ""


def test_a_stop_string_that_never_comes_holds_nothing_back_in_the_end() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    detokenizer = IncrementalDetokenizer(pieces, stop=["Paris!"])
    assert "".join(stream(detokenizer, tokenizer.encode("in Paris"))) == "in Paris"
    assert detokenizer.stop_reason is None


def test_a_stop_string_that_only_the_flush_completes_counts() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    detokenizer = IncrementalDetokenizer(pieces, stop=["a\ufffd"])
    assert (
        "".join(stream(detokenizer, [*tokenizer.encode("ba"), *tokenizer.encode("🙂")[:1]])) == "b"
    )
    assert detokenizer.stop_reason == "a\ufffd"


@pytest.mark.parametrize("kind", sorted(MAKERS))
@settings(deadline=None)  # machines differ
@given(data=st.data())
def test_a_stop_string_ends_in_text_of_tokens_after_the_first(
    kind: str, data: st.DataObject
) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    parts = data.draw(st.lists(st.sampled_from(parts_of(kind)), max_size=8))
    ids = joined(parts)
    text = decode_at_once(tokenizer, ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 3))] or "x"
    min_tokens = data.draw(st.integers(0, len(ids) + 1))
    num_whole = sum(len(joined(parts[: i + 1])) <= min_tokens for i in range(len(parts)))
    num_early = len(decode_at_once(tokenizer, joined(parts[:num_whole])))
    found = text.find(stop, max(0, num_early + 1 - len(stop)))
    detokenizer = IncrementalDetokenizer(pieces, stop=[stop], min_tokens=min_tokens)
    assert "".join(stream(detokenizer, ids)) == (text if found < 0 else text[:found])
    assert detokenizer.stop_reason == (None if found < 0 else stop)


def parts_of(kind: str) -> list[list[int]]:
    """Return single tokens, and the tokens of characters that are written by several."""
    tokenizer, _ = tokenizer_of(kind)
    if kind == "byte-level":
        return [tokenizer.encode(text) for text in ("a", " ", "\n", "é", "🙂")]
    words = [[id_of(tokenizer, token)] for token in ("a", "b", "\u2581the", "\u2581", "é")]
    if kind in ("metaspace", "wordpiece"):
        return words  # byte tokens are plain words there
    return [*words, *([3 + byte for byte in text.encode()] for text in (" ", "\n", "é", "🙂"))]


def joined(parts: list[list[int]]) -> list[int]:
    return [token_id for part in parts for token_id in part]


def test_a_newline_that_is_a_byte_token_is_text_of_that_token() -> None:
    tokenizer, pieces = tokenizer_of("sentencepiece")
    a, newline = id_of(tokenizer, "a"), 3 + ord("\n")
    detokenizer = IncrementalDetokenizer(pieces, stop=["\n"], min_tokens=2)
    assert "".join(stream(detokenizer, [a, newline, a, newline, a])) == "a\na"
    assert detokenizer.stop_reason == "\n"


@pytest.mark.parametrize(
    ("kind", "tokens", "num_pending"),
    [
        ("byte-level", ["a", "ð"], 0),  # what is complete was given out
        ("sentencepiece", ["a"], 0),
        ("sentencepiece", ["<0x41>", "<0xE4>"], 1),
        ("sentencepiece", ["<0xFF>", "<0x41>"], 2),  # no text, so a U+FFFD for each
        ("sentencepiece", ["<0x20>", "<0x20>"], 1),  # the first one is stripped
        ("sentencepiece", ["a", "<0x20>"], 1),
        ("metaspace", ["a"], 0),
        ("metaspace", ["a", f"{SPACE}\ufffd"], 1),  # the space
    ],
)
def test_complete_characters_that_are_not_certain_are_counted(
    kind: str, tokens: list[str], num_pending: int
) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    stream = pieces.stream()
    for token in tokens:
        stream.push(id_of(tokenizer, token))
    assert stream.num_pending() == num_pending


def test_tokens_that_are_not_shown_are_among_the_first_too() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    detokenizer = IncrementalDetokenizer(pieces, stop=["Z"], min_tokens=2)
    assert "".join(stream(detokenizer, [*tokenizer.encode("Z"), 4, *tokenizer.encode("Z")])) == "Z"
    assert detokenizer.stop_reason == "Z"


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_what_the_flush_adds_is_early_text_without_a_later_token(kind: str) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    half = tokenizer.encode("🙂")[:1] if kind == "byte-level" else [3 + 0xF0]
    for min_tokens, stop in ((1, None), (0, "\ufffd")):
        detokenizer = IncrementalDetokenizer(pieces, stop=["\ufffd"], min_tokens=min_tokens)
        assert "".join(stream(detokenizer, half)) == ("" if stop else "\ufffd")
        assert detokenizer.stop_reason == stop


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "metaspace"])
@pytest.mark.parametrize("token_id", [1, 5, 262])
def test_the_time_is_linear_whatever_the_tokens(kind: str, token_id: int) -> None:
    _, pieces = tokenizer_of(kind)

    def measure(num_tokens: int) -> float:
        detokenizer = IncrementalDetokenizer(pieces, skip_special_tokens=token_id != 1)
        start = time.process_time()
        for _ in range(num_tokens):
            detokenizer.push([token_id])
        return time.process_time() - start

    measure(100)
    # tenfold work; quadratic would be a hundredfold
    assert measure(10000) < 30 * measure(1000) + 0.1


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_tokens_without_text_do_not_make_later_ones_slow(kind: str) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    detokenizer = IncrementalDetokenizer(pieces)
    start = time.process_time()
    detokenizer.push([1] * 10000)
    assert time.process_time() - start < 2
    word = tokenizer.encode("a", add_special_tokens=False)
    assert detokenizer.push(word) + detokenizer.finish() == decode_at_once(tokenizer, word)


def test_one_table_serves_many_requests_at_once() -> None:
    tokenizer, pieces = tokenizer_of("byte-level")
    texts = ["🙂 one", "two 你好", "three"]
    streams = [(IncrementalDetokenizer(pieces), tokenizer.encode(text)) for text in texts]
    shown = ["", "", ""]
    for step in range(max(len(ids) for _, ids in streams)):
        for i, (detokenizer, ids) in enumerate(streams):
            shown[i] += detokenizer.push(ids[step : step + 1])
    assert [text + d.finish() for text, (d, _) in zip(shown, streams, strict=True)] == texts


@pytest.mark.parametrize(
    ("kind", "token", "expected"),
    [
        ("byte-level", "Ġ", b" "),
        ("byte-level", "ð", b"\xf0"),
        ("byte-level", "<|eos|>", b"<|eos|>"),
        ("sentencepiece", "<0xE4>", b"\xe4"),
        ("sentencepiece", "\u2581the", b" the"),
        ("metaspace", "a", b"a"),
    ],
)
def test_a_token_s_bytes_are_known(kind: str, token: str, expected: bytes) -> None:
    tokenizer, pieces = tokenizer_of(kind)
    assert pieces.token_bytes(id_of(tokenizer, token)) == expected
