"""Which tokens end a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minisgl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minisgl.weights.contract import ModelFiles


def eos_token_ids(
    files: ModelFiles, tokenizer: PreTrainedTokenizerBase | None = None
) -> frozenset[int]:
    """Return every end-of-sequence id that any part of a model names.

    ``config.json``, ``generation_config.json`` and the tokenizer often name different ones (the
    end of a text, the end of a turn); a model may emit each of them.

    Raises:
        ModelError: A file names something that is no token id.
    """
    ids = {
        *_read("config.json", files.config.get("eos_token_id")),
        *_read("generation_config.json", files.generation_config.get("eos_token_id")),
    }
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return frozenset(ids)


def _read(where: str, value: Any) -> Iterable[int]:  # an id, a list of ids, or null
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ModelError(f"{where}: eos_token_id {value!r}: must be token ids")
    return [token_id for token_id in ids if token_id >= 0]  # -1 is how some say that there is none
