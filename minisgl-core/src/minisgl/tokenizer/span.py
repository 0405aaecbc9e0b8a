"""How much text one token can stand for, so that some texts are too long without being tokenized.

Tokenizing 16 MiB takes a minute, in which a process that also detokenizes holds up every stream.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_SHRINKS = {"NFC": 4, "Prepend": 1}  # composing makes one of at most four characters
_KEEPS_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


@dataclass(frozen=True, slots=True)
class TextSpan:
    """What a tokenizer makes of a text at the least.

    Attributes:
        most_characters: That one token can stand for.
        lost: Characters that become no token at all.
    """

    most_characters: int
    lost: str = ""

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that ``text`` has at least."""
        num_kept = len(text) - sum(map(text.count, self.lost))
        return -(-num_kept // self.most_characters)


def text_span(tokenizer: PreTrainedTokenizerBase) -> TextSpan | None:
    """Find out how much of a text its tokens stand for.

    Returns:
        ``None`` where nothing can be known: for a tokenizer that leaves out parts of a text, or
        makes one token of any number of unknown characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # these take all space beside them
    lost = _lost(backend)
    shrink = _shrink(_described(backend.normalizer))
    if lost is None or shrink is None or not _keeps_text(_described(backend.pre_tokenizer)):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    return TextSpan(shrink * longest, lost)


def _lost(backend: Any) -> str | None:  # tokenizers.Tokenizer
    """Return characters that cost no token; ``None`` if there may be others than ASCII's."""
    model = backend.model
    if type(model).__name__ != "BPE":
        return None
    if model.byte_fallback or (model.unk_token is not None and not model.fuse_unk):
        return ""
    if model.unk_token is not None:
        return None
    # Byte-level: every other character has a byte that goes on from the one before it.
    missing = [code for code in range(0xC0) if backend.token_to_id(_last_letter(code)) is None]
    return "".join(map(chr, missing)) if max(missing, default=0) < 0x80 else None


def _last_letter(code: int) -> str:
    """Return the letter of a character's last byte; below U+00C0 that byte is the code itself."""
    letters: str = _BYTE_LEVEL.pre_tokenize_str(chr(code))[0][0]
    return letters[-1]


def _shrink(normalizer: dict[str, Any]) -> int | None:  # the library's own JSON
    """Return how many characters may become one; ``None`` if that is not known."""
    match normalizer:
        case {"type": "Sequence", "normalizers": list(steps)}:
            shrinks = [_shrink(step) for step in steps]
            return None if None in shrinks else math.prod(each or 1 for each in shrinks)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new) >= len(old) else None
        case {"type": str(kind)}:
            return _SHRINKS.get(kind)
    return 1


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:  # as above
    """Return whether all of the text goes on to the model."""
    if not pre_tokenizer:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_text, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in _KEEPS_TEXT and pre_tokenizer.get("behavior") != "Removed"


def _described(part: Any) -> dict[str, Any]:  # as above
    if part is None:
        return {}
    described: dict[str, Any] = json.loads(part.__getstate__())  # as above
    return described
