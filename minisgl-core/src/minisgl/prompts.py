"""What callers of the offline interface pass in, checked before anything runs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, SupportsIndex, cast

import numpy as np
import torch

from minisgl.engine.contract import EngineLimits
from minisgl.errors import RequestError
from minisgl.sampling_params import SamplingParams
from minisgl.shown import shown
from minisgl.tokenizer.encode import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]
"""A text, or token ids."""

# Their entries would pass for prompts: bytes are integers, and a mapping gives its keys.
_NO_PROMPTS = (bytes, bytearray, memoryview, Mapping)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from many: token ids are one prompt.

    Raises:
        RequestError: They are none, or an entry is neither a text nor token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, _NO_PROMPTS):
        rule = "must be a text, token ids, or a list of such"
        raise RequestError(f"prompts: {rule}, not {shown(prompts)}")
    batch = list(prompts)
    kinds = set(map(type, batch))  # a loop over tokens in Python would cost more than a step
    if batch and all(issubclass(kind, int | np.integer) for kind in kinds):
        return [cast("Prompt", prompts if isinstance(prompts, np.ndarray) else batch)]
    for i, each in enumerate(batch):
        if not isinstance(each, str | Sequence | np.ndarray) or isinstance(each, _NO_PROMPTS):
            raise _wrong_kind(each, f"prompts[{i}]")
    return [each for each in batch if not isinstance(each, int)]


def per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Give each prompt its parameters.

    Raises:
        RequestError: There is not one for each prompt, or something else among them.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    each = list(params) if isinstance(params, Sequence) else [params]
    for one in each:
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params: must be SamplingParams, not {shown(one)}")
    if len(each) != num_prompts:
        raise RequestError(
            f"sampling_params: has {len(each)} entries for {num_prompts} prompts; give one for "
            "all, or one for each"
        )
    return each


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, limits: EngineLimits, prompt: Prompt, where: str
) -> np.ndarray:
    """Return the token ids of a prompt.

    Args:
        tokenizer: For a text.
        limits: What the engine can take.
        prompt: Text or token ids.
        where: Names the prompt in messages.

    Returns:
        ``[num_tokens]`` int32, at least one and fewer than the context holds.

    Raises:
        RequestError: It is no prompt, empty, too long, or not of this vocabulary.
    """
    if isinstance(prompt, _NO_PROMPTS):
        raise _wrong_kind(prompt, where)
    ids = encode_text(tokenizer, prompt, where=where) if isinstance(prompt, str) else prompt
    array = _as_array(ids, where)
    if len(array) == 0:
        raise RequestError(f"{where}: is empty; at least one token is needed")
    if len(array) >= limits.max_seq_len:
        raise RequestError(
            f"{where}: has {len(array)} tokens; prompt and output together may have "
            f"{limits.max_seq_len}, and at least one is sampled, even with max_tokens 0"
        )
    # As unsigned numbers, negative ones are too large as well: one pass over a long prompt.
    if array.dtype != np.int32 or array.view(np.uint32).max() >= limits.vocab_size:
        for token_id in (int(array.min()), int(array.max())):
            if not 0 <= token_id < limits.vocab_size:
                raise RequestError(
                    f"{where}: token id {shown(token_id)}: must be from 0 to "
                    f"{limits.vocab_size - 1}"
                )
    return array.astype(np.int32)


def _wrong_kind(prompt: object, where: str) -> RequestError:
    return RequestError(f"{where}: must be a text or token ids, not {shown(prompt)}")


def _as_array(ids: Sequence[int], where: str) -> np.ndarray:
    """Return token ids as integers of whatever width; a fraction must not be cut to another token.

    Raises:
        RequestError: One of them is no integer.
    """
    is_masked = isinstance(ids, np.ma.MaskedArray)  # then an entry may have no value
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu" and not is_masked:
        return ids
    try:
        # Refuses what is no integer, and is twice as quick as numpy's own way from a list.
        array = np.frombuffer(struct.pack(f"{len(ids)}i", *ids), dtype=np.int32)
    except (struct.error, TypeError, ValueError):
        has_doubts = True  # something is no integer, or a large one
    else:
        # True packs as 1, that of other libraries too.
        kinds = set(map(type, ids)) if array.min(initial=2) < 2 else set()
        has_doubts = bool in kinds or not all(issubclass(k, int | np.integer) for k in kinds)
    if has_doubts:
        return np.array([_as_int(token_id, where) for token_id in ids], dtype=object)
    return array


def _as_int(token_id: SupportsIndex, where: str) -> int:
    """Return what Python itself takes for an integer, a bool excepted."""
    try:
        number = index(token_id)
    except (TypeError, ValueError):
        number = None
    is_bool = isinstance(token_id, bool) or getattr(token_id, "dtype", None) == torch.bool
    if number is None or is_bool:
        raise RequestError(f"{where}: token id {shown(token_id)}: must be an integer")
    return number
