"""What each token adds to the text, one token at a time.

Decoding all tokens again for each new one would take quadratic time, and a single token often has
no text of its own: it may hold half a character. A `PieceStream` takes token after token and
returns text as soon as it can no longer change; the pieces together are exactly what
``tokenizer.decode(ids, clean_up_tokenization_spaces=False)`` makes of all tokens at once.

There are three ways, by the tokenizer's decoder. Byte-level tokens are strings of bytes. A
sentencepiece token is text, or one byte in a run of bytes that is valid or not as a whole. For
any other decoder a short window of tokens is decoded again.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_HELD_TOKENS = 3  # a character has at most four bytes, so three tokens may be incomplete


class PieceStream(ABC):
    """Turns the tokens of one sequence into text; used once."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain, maybe none."""

    @abstractmethod
    def num_pending(self) -> int:
        """Return how many characters the tokens so far complete, but are not yet certain."""

    @abstractmethod
    def finish(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD."""


class TokenPieces:
    """The tokens of one tokenizer as pieces of text; made once, used for all requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find out how the tokenizer decodes."""
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special_ids = _special_ids(tokenizer, self._backend)
        self._cache: dict[int, bytes] = {}
        decoder = _describe_decoder(self._backend)
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._num_stripped = _sentencepiece_strip(decoder)

    def stream(self, skip_special_tokens: bool = True) -> PieceStream:
        """Start a sequence."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return _ByteStream(self._bytes_of, hidden)
        if self._num_stripped is not None:
            return _FallbackStream(self._token, hidden, self._num_stripped)
        return _WindowStream(self._decode, hidden)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode a whole sequence: the same text as its stream gives."""
        stream = self.stream(skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token by itself, maybe an incomplete character."""
        if self._is_byte_level:
            return self._bytes_of(token_id)
        token = self._token(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if self._num_stripped is not None:
            return token.encode()
        return self._decode([token_id]).encode()

    def _token(self, token_id: int) -> str | None:
        """Return a token with sentencepiece's spaces as spaces; ``None`` for an unused id."""
        token = None if self._backend is None else self._backend.id_to_token(token_id)
        return None if token is None else token.replace("\u2581", " ")

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a byte-level token; b"" for an unused id."""
        raw = self._cache.get(token_id)
        if raw is None:
            assert self._backend is not None, "byte-level tokenizers have a backend"
            raw = _from_byte_alphabet(self._backend.id_to_token(token_id) or "")
            self._cache[token_id] = raw
        return raw

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one sequence decodes to one text"
        return text


class _ByteStream(PieceStream):
    """Byte-level: the bytes of all tokens are one UTF-8 text."""

    def __init__(self, bytes_of: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._bytes_of(token_id))

    def num_pending(self) -> int:
        return 0

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FallbackStream(PieceStream):
    """Sentencepiece with bytes: a run of byte tokens is one text, or not text at all."""

    def __init__(
        self, token: Callable[[int], str | None], hidden: frozenset[int], num_stripped: int
    ) -> None:
        self._token = token
        self._hidden = hidden
        self._num_stripped = num_stripped  # spaces that are still to be taken off the start
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        token = None if token_id in self._hidden else self._token(token_id)
        if token is None:
            return ""  # nothing at all, so it does not end a run of bytes either
        if match := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(match[1], 16))
            return ""
        return self._strip(self._end_run() + token)

    def num_pending(self) -> int:
        try:  # not final: bytes of an incomplete character at the end are no error
            text, _ = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        num_spaces = len(text) - len(text.lstrip(" "))
        return len(text) - min(num_spaces, self._num_stripped)

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        while self._num_stripped and text:
            if not text.startswith(" "):
                self._num_stripped = 0
                break
            text = text[1:]
            self._num_stripped -= 1
        return text


class _WindowStream(PieceStream):
    """Any decoder: the newest tokens are decoded with and without the newest piece."""

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._window: list[int] = []  # the tokens of the last piece, then those held back
        self._num_told = 0  # tokens of the window whose text was returned
        self._told = ""  # their text

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._told and self._num_told:
            self._window.pop()  # says nothing, so it must not make the window longer
            return ""
        if not text:
            return self._tell(text)  # the first token stays: what follows is no longer the first
        num_held = len(self._window) - self._num_told
        if text.endswith(_REPLACEMENT) and num_held <= _MAX_HELD_TOKENS:
            return ""
        return self._tell(text)

    def num_pending(self) -> int:
        if len(self._window) == self._num_told:
            return 0
        return len(self._decode(self._window)[len(self._told) :].rstrip(_REPLACEMENT))

    def finish(self) -> str:
        if len(self._window) == self._num_told:
            return ""
        return self._tell(self._decode(self._window))

    def _tell(self, text: str) -> str:
        piece = text[len(self._told) :]
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._decode(self._window)
        return piece


def _special_ids(tokenizer: PreTrainedTokenizerBase, backend: Any) -> frozenset[int]:
    """Return the ids that ``skip_special_tokens`` leaves out."""
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _describe_decoder(backend: Any) -> dict[str, Any]:  # the library's own JSON
    """Return the decoder's JSON, empty if there is none to be seen."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return {}
    described: dict[str, Any] = json.loads(decoder.__getstate__())
    return described


def _sentencepiece_strip(decoder: dict[str, Any]) -> int | None:
    """Return how many spaces sentencepiece's decoder strips; ``None`` if it is another one."""
    steps = [dict(step) for step in decoder.get("decoders", [])]
    num_stripped = 0
    if steps and steps[-1].get("type") == "Strip":
        strip = steps.pop()
        if strip.get("content") != " " or strip.get("stop"):
            return None
        num_stripped = int(strip.get("start", 0))
    expected = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return num_stripped if steps == expected else None


def _from_byte_alphabet(token: str) -> bytes:
    """Undo GPT-2's spelling of bytes; a token with any other character is plain text."""
    raw = bytearray()
    for character in token:
        byte = _byte_of(ord(character))
        if byte is None:
            return token.encode()
        raw.append(byte)
    return bytes(raw)


def _byte_of(code: int) -> int | None:
    """Return the byte that a character stands for.

    Printable Latin-1 characters stand for themselves; the 68 other bytes are, in order, the
    characters from U+0100 on.
    """
    if 0x21 <= code <= 0x7E or 0xA1 <= code <= 0xFF and code != 0xAD:
        return code
    shifted = code - 0x100
    if 0 <= shifted <= 0x20:  # bytes 0x00 to 0x20
        return shifted
    if 0x21 <= shifted <= 0x42:  # bytes 0x7f to 0xa0
        return shifted + 0x5E
    return 0xAD if shifted == 0x43 else None
