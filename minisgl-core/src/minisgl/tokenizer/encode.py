"""From text to token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    add_special_tokens: bool = True,
    *,
    where: str = "prompt",
) -> list[int]:
    """Tokenize a plain prompt; for chats see `minisgl.tokenizer.chat.encode_chat`.

    Args:
        tokenizer: The model's.
        text: The prompt. Special tokens that are spelled out in it count as such.
        add_special_tokens: Add what the tokenizer adds to a text (for most a BOS, or nothing). A
            BOS that the text spells out already is not added twice.
        where: Names the prompt in messages.

    Returns:
        At least one id.

    Raises:
        RequestError: The text is empty, no string, or cannot be written in UTF-8.
    """
    if not isinstance(text, str):
        raise RequestError(f"{where}: must be a string, not {type(text).__name__}")
    check_unicode(where, text)
    # verbose=False: that a text is longer than the model's context is checked where it is known.
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
        "input_ids"
    ]
    bos = tokenizer.bos_token_id
    if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise RequestError(f"{where}: is empty, and this model has no token that begins a text")
    return ids


def check_unicode(where: str, text: str) -> None:
    """Refuse a text with half of a surrogate pair, which no tokenizer takes.

    Python makes them of bytes that are not UTF-8, and JSON can spell them.

    Raises:
        RequestError: There is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise RequestError(
            f"{where}: is not UTF-8 text: it has the lone surrogate {found!r}"
        ) from error
