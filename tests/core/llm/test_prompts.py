"""Prompts of token ids, in every form that callers have them in."""

from __future__ import annotations

from array import array
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from minisgl.engine.contract import EngineLimits
from minisgl.errors import RequestError
from minisgl.prompts import as_batch, encode_prompt

LIMITS = EngineLimits(
    num_pages=9,
    page_size=16,
    max_running_reqs=1,
    max_seq_len=99,
    vocab_size=320,
    eos_token_ids=frozenset(),
)
NO_TOKENIZER = cast("PreTrainedTokenizerBase", None)


def encode(ids: Any) -> np.ndarray:  # Any: wrong types on purpose
    return encode_prompt(NO_TOKENIZER, LIMITS, ids, "prompt")


class Unwilling:
    """Raises what no caller expects when it is taken for an integer."""

    def __index__(self) -> int:
        raise ValueError("no")

    def __repr__(self) -> str:
        return "unwilling"


@pytest.mark.parametrize(
    "ids",
    [
        [1, 0, 319],
        (1, 0, 319),
        array("q", [1, 0, 319]),
        np.array([1, 0, 319]),
        np.array([1, 0, 319], dtype=np.uint16),
        np.array([1, 0, 319], dtype=object),
        [np.int64(1), 0, np.uint8(63) * np.uint16(5) + 4],
        np.ma.MaskedArray([1, 0, 319]),
        list(torch.tensor([1, 0, 319])),
    ],
)
def test_integers_of_every_kind_are_token_ids(ids: Any) -> None:
    encoded = encode(ids)
    assert encoded.dtype == np.int32
    assert encoded.tolist() == [1, 0, 319]


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([5, True], "True"),
        ([False], "False"),
        ([5, np.True_], "np.True_"),
        ([5, 2.0], "2.0"),
        (np.array([1.5]), "np.float64(1.5)"),
        (np.array([True]), "np.True_"),
        (np.array([[7]]), "array([7])"),
        ([5, None], "None"),
        ([10**30, "7"], "'7'"),
        ([5, [6]], "[6]"),
        ([torch.tensor(True)], "tensor(True)"),
        ([5, Unwilling()], "unwilling"),
        (np.ma.MaskedArray([5, 6], mask=[False, True]), "masked"),
        ([np.timedelta64(5, "s")], "np.timedelta64(5,'s')"),
    ],
)
def test_what_is_no_integer_is_no_token_id(ids: Any, shown: str) -> None:
    with pytest.raises(RequestError) as error:
        encode(ids)
    assert str(error.value) == f"prompt: token id {shown}: must be an integer"


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([5, -1, 320], "-1"),
        ([5, 320], "320"),
        ([2**31], "2147483648"),
        ([2**40 + 5, 7], "1099511627781"),
        (np.array([2**32 + 5]), "4294967301"),
        (np.array([2**63 + 1], dtype=np.uint64), "9223372036854775809"),
    ],
)
def test_an_id_of_another_vocabulary_is_named_however_large(ids: Any, shown: str) -> None:
    with pytest.raises(RequestError) as error:
        encode(ids)
    assert str(error.value) == f"prompt: token id {shown}: must be from 0 to 319"


@pytest.mark.parametrize("ids", [[], np.empty(0, dtype=np.int32)])
def test_a_prompt_without_tokens_is_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match="is empty"):
        encode(ids)


def test_an_encoded_prompt_is_a_copy() -> None:
    ids = np.array([5, 6], dtype=np.int32)
    encoded = encode(ids)
    ids[0] = 7
    assert encoded.tolist() == [5, 6]


@pytest.mark.parametrize("ids", [[5, 6], (5, 6), np.array([5, 6]), iter([5, 6]), [np.int64(5), 6]])
def test_token_ids_alone_are_one_prompt(ids: Any) -> None:
    (prompt,) = as_batch(ids)
    assert encode(prompt).tolist() == [5, 6]


def test_rows_of_an_array_are_prompts() -> None:
    assert [encode(row).tolist() for row in as_batch(cast("Any", np.array([[5, 6], [7, 8]])))] == [
        [5, 6],
        [7, 8],
    ]


def test_token_ids_among_prompts_are_refused() -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]: must be a text or token ids, not 5"):
        as_batch(cast("Any", ["a", 5]))


NO_PROMPTS = [b"ab", bytearray(b"ab"), memoryview(b"ab"), {"prompt": "ab"}]


@pytest.mark.parametrize("wrong", [*NO_PROMPTS, 5, None], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_prompt_is_refused_as_prompts(wrong: Any) -> None:
    with pytest.raises(RequestError) as error:
        as_batch(wrong)
    rule = "must be a text, token ids, or a list of such"
    assert str(error.value) == f"prompts: {rule}, not {wrong!r}"


@pytest.mark.parametrize("wrong", [*NO_PROMPTS, 5, None], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_prompt_is_refused_among_prompts(wrong: Any) -> None:
    with pytest.raises(RequestError) as error:
        as_batch(["a", wrong])
    assert str(error.value) == f"prompts[1]: must be a text or token ids, not {wrong!r}"


@pytest.mark.parametrize("wrong", NO_PROMPTS, ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_prompt_is_refused_alone(wrong: Any) -> None:
    with pytest.raises(RequestError) as error:
        encode(wrong)
    assert str(error.value) == f"prompt: must be a text or token ids, not {wrong!r}"
