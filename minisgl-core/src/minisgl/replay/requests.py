"""From a trace to requests: with the recorded tokens, or with made-up ones of the same structure.

Where the trace has no token ids, each named block becomes a block of tokens of its own, so that
two prompts have in common what they had when they were recorded, no more and no less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from minisgl.message.types import UserMsg
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.trace import Arrival, Ending, Restart, Trace
from minisgl.scheduler.trace_params import made_params


@dataclass(frozen=True, slots=True)
class Script:
    """One request, as it shall happen again.

    Attributes:
        arrival: When and how it came.
        ending: How it ended, or ``None`` where the trace ends before.
        tokens: ``[n]`` int32: the prompt, and as much of the output as is known.
    """

    arrival: Arrival
    ending: Ending | None
    tokens: np.ndarray

    @property
    def is_comparable(self) -> bool:
        """Whether the model, given the recorded prompt, should choose the recorded tokens."""
        params = self.arrival.params
        is_repeatable = params.get("temperature", 0.0) == 0 or params.get("seed") is not None
        return is_repeatable and self.arrival.token_ids is not None

    def is_stop(self, index: int) -> bool:
        """Whether a token of the output ended the request."""
        ending = self.ending
        return ending is not None and ending.reason == "stop" and index == ending.num_tokens - 1

    def output_token(self, index: int) -> int | None:
        """Return a token of the output, or ``None`` where it is not known."""
        at = self.arrival.prompt_len + index
        return int(self.tokens[at]) if at < len(self.tokens) else None


class Scripts:
    """All requests of a trace, in order of arrival."""

    def __init__(self, trace: Trace, vocab_size: int) -> None:
        """Find out how each request ended, and settle its tokens.

        Args:
            trace: What was recorded.
            vocab_size: Made-up token ids are below this.
        """
        self._header = trace.header
        self._vocab_size = vocab_size
        self._invented = InventedTokens(trace.header.block_size, vocab_size)
        self.all = [self._script(*pair) for pair in _paired(trace)]

    def message(self, script: Script) -> UserMsg:
        """Make the message that brings a request in."""
        arrival = script.arrival
        ids = script.tokens[: arrival.prompt_len]
        if arrival.is_invalid:
            # One token will do to be refused; the length is not checked against anything.
            ids = np.full(min(1, arrival.prompt_len), self._vocab_size, np.int32)
        return UserMsg(arrival.uid, ids, self._params(script), arrival.priority)

    def _params(self, script: Script) -> SamplingParams:
        """Return how to sample; made-up tokens never end a request by themselves."""
        params = made_params(script.arrival.params)
        return params if self._header.has_prompts else replace(params, ignore_eos=True)

    def _script(self, arrival: Arrival, ending: Ending | None) -> Script:
        if arrival.is_invalid:
            return Script(arrival, ending, np.empty(0, np.int32))
        if arrival.token_ids is not None:
            output = [] if ending is None else ending.token_ids or []
            return Script(arrival, ending, np.array([*arrival.token_ids, *output], np.int32))
        num_tokens = arrival.prompt_len + (0 if ending is None else ending.num_tokens)
        names = arrival.blocks + ([] if ending is None else ending.blocks)
        return Script(arrival, ending, self._invented.sequence(names, num_tokens))


class InventedTokens:
    """Makes up tokens for named blocks, the same ones for the same name.

    Blocks are numbered, and a number's digits are the tokens. Where there are fewer different
    blocks than names, as with blocks of one token, two behind the same prefix still differ.
    """

    def __init__(self, block_size: int, num_ids: int) -> None:
        """Invent ids below ``num_ids``."""
        self._block_size = block_size
        self._num_ids = num_ids
        self._num_different = num_ids**block_size
        self._blocks: dict[str, np.ndarray] = {}
        self._num_blocks = 0
        self._children: dict[str, set[int]] = defaultdict(set)  # numbers behind a prefix

    def sequence(self, names: list[str], num_tokens: int) -> np.ndarray:
        """Return ``[num_tokens]`` int32 that begins with the named blocks.

        What is left behind the last of them belongs to this sequence alone.
        """
        blocks: list[np.ndarray] = []
        last = ""
        for name in names:
            if name not in self._blocks:
                self._blocks[name] = self._new_block(last)
            blocks.append(self._blocks[name])
            last = name
        num_left = num_tokens - len(names) * self._block_size
        while num_left > 0:
            # Nobody else has a block behind this one.
            blocks.append(self._new_block(last)[:num_left])
            last = f"after block {self._num_blocks}"
            num_left -= self._block_size
        tokens = np.concatenate(blocks) if blocks else np.empty(0, np.int32)
        return tokens[:num_tokens].copy()

    def _new_block(self, parent: str) -> np.ndarray:
        """Return a block that no other one behind the prefix ``parent`` is like."""
        siblings = self._children[parent]
        if len(siblings) >= self._num_different:
            siblings.clear()  # no real tokens could be that different either
        number = self._num_blocks % self._num_different
        while number in siblings:
            number = (number + 1) % self._num_different
        siblings.add(number)
        self._num_blocks += 1
        digits = np.zeros(self._block_size, np.int32)
        for place in range(self._block_size):
            number, digits[place] = divmod(number, self._num_ids)
        return digits


def _paired(trace: Trace) -> Iterator[tuple[Arrival, Ending | None]]:
    """Yield each request with its end."""
    arrivals: list[Arrival] = []
    endings: dict[int, Ending] = {}  # by index of the arrival
    open_reqs: dict[int, list[int]] = defaultdict(list)  # uid to indices, the newest last
    for event in trace.events:
        match event:
            case Arrival():
                open_reqs[event.uid].append(len(arrivals))
                arrivals.append(event)
            case Ending():
                if open_reqs[event.uid]:
                    # Of two of one uid the second is refused, before the first can end.
                    endings[open_reqs[event.uid].pop()] = event
            case Restart():
                open_reqs.clear()
    for index, arrival in enumerate(arrivals):
        yield arrival, endings.get(index)
