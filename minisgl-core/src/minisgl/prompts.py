"""What callers of the offline interface pass in, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minisgl.engine.contract import EngineLimits
from minisgl.errors import RequestError
from minisgl.sampling_params import SamplingParams
from minisgl.shown import shown
from minisgl.tokenizer.encode import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]
"""A text, or token ids."""


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from many: token ids are one prompt.

    Raises:
        RequestError: An entry is neither a text nor token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(each, int | np.integer) for each in batch):
        return [[int(each) for each in batch if isinstance(each, int | np.integer)]]
    for i, each in enumerate(batch):
        if not isinstance(each, str | Sequence | np.ndarray) or isinstance(each, Mapping | bytes):
            raise RequestError(f"prompts[{i}]: must be a text or token ids, not {shown(each)}")
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
        RequestError: It is empty, too long, or not of this vocabulary.
    """
    if isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt, where=where)
    else:
        ids = _checked(prompt, where)
    if not ids:
        raise RequestError(f"{where}: is empty; at least one token is needed")
    if len(ids) >= limits.max_seq_len:
        raise RequestError(
            f"{where}: has {len(ids)} tokens; prompt and output together may have "
            f"{limits.max_seq_len}, and at least one is sampled, even with max_tokens 0"
        )
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"{where}: token id {shown(token_id)}: must be from 0 to {limits.vocab_size - 1}"
            )
    return np.array(ids, dtype=np.int32)


def _checked(ids: Sequence[int], where: str) -> list[int]:
    """Return token ids as a list; a fraction must not be cut to another token."""
    if set(map(type, ids)) == {int}:  # the usual case, without a loop over tokens in Python
        return list(ids)
    for token_id in ids:
        if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
            raise RequestError(f"{where}: token id {shown(token_id)}: must be an integer")
    return [int(token_id) for token_id in ids]
