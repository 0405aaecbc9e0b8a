"""An engine without a model: its tokens depend on every KV slot that a real one would read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from minisgl.core import Batch, StepArrays
from minisgl.engine.contract import EngineLimits, ForwardOutput, StepEngine, StepResult

_MIX = 0x9E3779B97F4A7C15
_SHIFT = np.uint64(29)


def make_limits(
    num_pages: int = 64,
    page_size: int = 4,
    max_running_reqs: int = 8,
    max_seq_len: int = 128,
    vocab_size: int = 97,
    eos_token_ids: frozenset[int] = frozenset(),
) -> EngineLimits:
    """Make limits of a small engine."""
    return EngineLimits(
        num_pages, page_size, max_running_reqs, max_seq_len, vocab_size, eos_token_ids
    )


class FakeModel:
    """A function of the whole history, in two layers as attention would compute it.

    The first layer keeps each token, the second a hash of all tokens up to it; the next token is a
    hash of the second layer. So a wrong page anywhere, or one that was read before it was
    written, changes what comes out.
    """

    def __init__(self, max_seq_len: int, vocab_size: int) -> None:
        """Make the weights of each position.

        Args:
            max_seq_len: Positions.
            vocab_size: Tokens are below this.
        """
        rng = np.random.default_rng(0)
        self._weights = rng.integers(1, 2**63, size=(2, max_seq_len + 1), dtype=np.uint64)
        self._weights |= np.uint64(1)
        self._vocab_size = vocab_size

    def second_layer(self, first: np.ndarray) -> np.ndarray:
        """Return the hashes of all prefixes of ``first``, ``[num_tokens]`` uint64."""
        return np.cumsum((first + np.uint64(1)) * self._weights[0, : len(first)])

    def next_token(self, second: np.ndarray) -> int:
        """Return the token after ``second``, ``[num_tokens]`` uint64."""
        total = np.add.reduce((second ^ (second >> _SHIFT)) * self._weights[1, : len(second)])
        return ((int(total) * _MIX) % 2**64 >> 33) % self._vocab_size

    def generate(self, prompt: list[int], num_tokens: int, stops: frozenset[int]) -> list[int]:
        """Return what a correct engine generates after ``prompt``; a stop token is the last."""
        tokens = np.zeros(len(prompt) + num_tokens, dtype=np.uint64)
        tokens[: len(prompt)] = prompt
        for end in range(len(prompt), len(tokens)):
            token = self.next_token(self.second_layer(tokens[:end]))
            tokens[end] = token
            if token in stops:
                return [int(t) for t in tokens[len(prompt) : end + 1]]
        return [int(t) for t in tokens[len(prompt) :]]


@dataclass(slots=True)
class FakeStep(ForwardOutput):
    """A launched step, with copies of everything that the host may change after the launch."""

    engine: FakeEngine
    arrays: StepArrays
    phase: str
    is_sampled: list[bool]
    inputs: list[np.ndarray]
    holders: dict[int, int]  # page to uid, of all pages that it reads or writes
    token_ids: np.ndarray | None = None

    def wait(self) -> StepResult:
        """Run all steps up to this one, as late as an asynchronous device might."""
        self.engine.run_until(self)
        assert self.token_ids is not None, "the step has run"
        return StepResult(self.token_ids, {})


class FakeEngine(StepEngine):
    """Computes steps lazily and in order, on its own page table, token pool and KV slots.

    What a step reads and writes on the "device" happens when its result is waited for; only the
    arrays that travel with a launch are copied at the launch.
    """

    def __init__(self, limits: EngineLimits) -> None:
        """Allocate everything, filled with rubbish.

        Args:
            limits: Sizes.
        """
        self.limits = limits
        self.model = FakeModel(limits.max_seq_len, limits.vocab_size)
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.on_launch: Callable[[Batch], None] | None = None  # may raise, to inject a fault
        max_pages = -(-limits.max_seq_len // limits.page_size)
        num_slots = limits.num_pages * limits.page_size
        self._page_table = np.full((limits.max_running_reqs, max_pages), -1, dtype=np.int32)
        self._token_pool = np.full((limits.max_running_reqs, limits.max_seq_len), -1, np.int64)
        self._first = np.full(num_slots, 2**40, dtype=np.uint64)
        self._second = np.full(num_slots, 2**41, dtype=np.uint64)
        self._launched: deque[FakeStep] = deque()

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Launch one step; see `StepEngine.forward_batch`."""
        if self.on_launch is not None:
            self.on_launch(batch)
        assert batch.host is not None, "the scheduler sets batch.host"
        self._check(batch, batch.host)
        holders = self._check_pages(batch, batch.host)
        inputs = []
        if batch.is_prefill:
            inputs = [req.tokens[req.cached_len : req.device_len].copy() for req in batch.reqs]
            self.num_prefill_tokens += sum(len(tokens) for tokens in inputs)
        arrays = _copied(batch.host)
        step = FakeStep(self, arrays, batch.phase, list(batch.is_sampled), inputs, holders)
        self._launched.append(step)
        self.num_steps += 1
        return step

    def run_until(self, step: FakeStep) -> None:
        """Run launched steps, in order, until ``step`` has run."""
        while step.token_ids is None:
            self._run(self._launched.popleft())

    def _check(self, batch: Batch, arrays: StepArrays) -> None:
        """See that the scheduler keeps its side of the contract."""
        places = arrays.page_rows.astype(np.int64) * 2**32 + arrays.page_cols
        assert len(np.unique(places)) == len(places), "a page-table entry is updated twice"
        assert len(set(arrays.table_idx.tolist())) == len(batch.reqs), "a row occurs twice"
        for name in ("table_idx", "cached_lens", "seq_lens", "page_rows", "page_cols", "page_ids"):
            assert getattr(arrays, name).dtype == np.int32, f"{name} is not int32"
        for index, req in enumerate(batch.reqs):
            assert req.table_idx == arrays.table_idx[index], f"{req}: wrong row"
            assert req.cached_len == arrays.cached_lens[index], f"{req}: wrong cached_len"
            assert req.device_len == arrays.seq_lens[index], f"{req}: wrong seq_len"
            assert req.cached_len < req.device_len, f"{req}: nothing to compute"
            assert batch.is_prefill or req.extend_len == 1, f"{req}: decodes one token"

    def _check_pages(self, batch: Batch, arrays: StepArrays) -> dict[int, int]:
        """See that nobody writes to a page that another request uses, in flight or in this step.

        Returns:
            Page to uid for all pages that the step uses.
        """
        page_size, table = self.limits.page_size, arrays.page_table
        holders: dict[int, int] = {}
        written: dict[int, int] = {}
        for req in batch.reqs:
            pages = table[req.table_idx, : -(-req.device_len // page_size)].tolist()
            holders.update(dict.fromkeys(pages, req.uid))
            for page in pages[req.cached_len // page_size :]:
                assert page not in written, f"page {page} is written by two requests"
                written[page] = req.uid
        for req in batch.reqs:
            for page in table[req.table_idx, : req.cached_len // page_size].tolist():
                assert page not in written, f"{req} reads page {page} while it is being written"
        for step in self._launched:
            for page, uid in written.items():
                other = step.holders.get(page, uid)
                assert other == uid, f"page {page} is taken from {other}, which is in flight"
        return holders

    def _run(self, step: FakeStep) -> None:
        """Compute one step on the device's own state."""
        arrays = step.arrays
        self._page_table[arrays.page_rows, arrays.page_cols] = arrays.page_ids
        # All KV of the batch is written layer by layer, before anything of that layer is read.
        slots = [self._slots(*pair) for pair in zip(arrays.table_idx, arrays.seq_lens, strict=True)]
        for index, (row, start) in enumerate(
            zip(arrays.table_idx.tolist(), arrays.cached_lens.tolist(), strict=True)
        ):
            if step.phase == "prefill":
                tokens = step.inputs[index]
            else:
                tokens = self._token_pool[row, start : start + 1]
            self._first[slots[index][start:]] = tokens
        for index, start in enumerate(arrays.cached_lens.tolist()):
            hashes = self.model.second_layer(self._first[slots[index]])
            self._second[slots[index][start:]] = hashes[start:]
        sampled = []
        for index, (row, seq_len) in enumerate(
            zip(arrays.table_idx.tolist(), arrays.seq_lens.tolist(), strict=True)
        ):
            if step.phase == "prefill" and not step.is_sampled[index]:
                continue
            token = self.model.next_token(self._second[slots[index]])
            self._token_pool[row, seq_len] = token
            sampled.append(token)
        step.token_ids = np.array(sampled, dtype=np.int32)

    def _slots(self, row: int, seq_len: int) -> np.ndarray:
        """Return the KV slots of the first ``seq_len`` tokens of a row."""
        page_size = self.limits.page_size
        pages = self._page_table[row, : -(-int(seq_len) // page_size)].astype(np.int64)
        slots = pages[:, None] * page_size + np.arange(page_size)
        return slots.reshape(-1)[:seq_len]


class InstantEngine(StepEngine):
    """Makes the same token for everyone at no cost, for measuring the host's work."""

    def __init__(self, limits: EngineLimits, token_id: int = 1) -> None:
        """Prepare the result of every step.

        Args:
            limits: Sizes.
            token_id: What everyone gets.
        """
        self.limits = limits
        self._tokens = np.full(limits.max_running_reqs, token_id, dtype=np.int32)

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Return a finished step."""
        num_sampled = sum(batch.is_sampled) if batch.is_prefill else batch.size
        return _Done(StepResult(self._tokens[:num_sampled], {}))


@dataclass(frozen=True, slots=True)
class _Done(ForwardOutput):
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def _copied(arrays: StepArrays) -> StepArrays:
    """Copy what a launch takes along; the live page table is not for later."""
    copies = {
        name: getattr(arrays, name).copy()
        for name in ("table_idx", "cached_lens", "seq_lens", "page_rows", "page_cols", "page_ids")
    }
    return replace(arrays, **copies)
