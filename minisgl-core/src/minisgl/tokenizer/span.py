"""How much text one token can stand for, so that some texts are too long without being tokenized.

Tokenizing 16 MiB takes a minute, in which a process that also detokenizes holds up every stream.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHRINKS = {"NFC": 4, "Prepend": 1}  # composing makes one of at most four characters
_KEEPS_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


def most_characters_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return a number of characters that no token of a text can exceed.

    Returns:
        The number; ``None`` where there is none, or none that can be known: a tokenizer that leaves
        out parts of a text, or makes one token of any number of unknown characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _keeps_unknown(backend):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # these take all space beside them
    shrink = _shrink(_described(backend.normalizer))
    if shrink is None or not _keeps_text(_described(backend.pre_tokenizer)):
        return None
    return shrink * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


def _keeps_unknown(backend: Any) -> bool:  # tokenizers.Tokenizer
    """Return whether each unknown character costs a token, or there is none."""
    model = backend.model
    if type(model).__name__ != "BPE":
        return False
    if model.byte_fallback:
        return True
    if model.unk_token is not None:
        return not model.fuse_unk
    return all(
        backend.token_to_id(letter) is not None for letter in pre_tokenizers.ByteLevel.alphabet()
    )


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
