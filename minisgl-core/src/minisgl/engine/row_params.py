"""Sampling parameters by page-table row, as host arrays that a step gathers from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.core import Req, SamplingParams
from minisgl.engine.packed import Field
from minisgl.ops.contract import SamplingHints, SamplingInputs

_INT32_MAX = 2**31 - 1
_PARAM_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
}


class RowParams:
    """What each running request wants of the sampler.

    Written when a request is first computed, read by every step. The row behind the last is for
    padding: greedy.
    """

    def __init__(self, num_rows: int, vocab_size: int, base_seed: int, is_always_edited: bool):
        """Make room.

        Args:
            num_rows: Rows of the page table.
            vocab_size: What a ``top_k`` of -1 becomes.
            base_seed: Seeds of requests without one are derived from it and their uid; the same
                on every rank, another in every engine.
            is_always_edited: Every row takes the path that edits logits (a logits processor is
                installed).
        """
        size = num_rows + 1
        self._vocab_size = vocab_size
        self._base_seed = base_seed
        self._is_always_edited = is_always_edited
        self._arrays: dict[str, np.ndarray] = {
            "temperature": np.zeros(size, np.float32),
            "top_k": np.full(size, vocab_size, np.int32),
            "top_p": np.ones(size, np.float32),
            "min_p": np.zeros(size, np.float32),
            "seeds": np.zeros(size, np.int64),
        }
        self._top_width = np.zeros(size, np.int32)  # see SamplingHints
        self._edited_below = np.zeros(size, np.int32)  # seq_len from which the plain logits do
        self._has_logprobs = np.zeros(size, np.bool_)

    def admit(self, reqs: Sequence[Req]) -> None:
        """Take the parameters of requests whose rows are their ``table_idx``."""
        if not reqs:
            return
        rows = np.array([req.table_idx for req in reqs])
        params = [req.sampling_params for req in reqs]
        arrays, vocab_size = self._arrays, self._vocab_size
        arrays["temperature"][rows] = [0.0 if p.is_greedy else p.temperature for p in params]
        arrays["top_k"][rows] = [vocab_size if p.top_k == -1 else p.top_k for p in params]
        arrays["top_p"][rows] = [p.top_p for p in params]
        arrays["min_p"][rows] = [p.min_p for p in params]
        arrays["seeds"][rows] = np.array([self._seed(req) for req in reqs], np.uint64).view(
            np.int64
        )
        self._top_width[rows] = [self._hint_width(p) for p in params]
        self._edited_below[rows] = [self._edit_limit(req) for req in reqs]
        self._has_logprobs[rows] = [p.logprobs is not None for p in params]

    def reset(self, row: int) -> None:
        """Make a row a padding row again: greedy, unedited."""
        self._arrays["temperature"][row] = 0.0
        self._top_width[row] = 0
        self._arrays["min_p"][row] = 0.0
        self._edited_below[row] = 0
        self._has_logprobs[row] = False

    def gather(self, rows: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Write the parameters of ``rows`` to the arrays of the same names in ``out``."""
        for name, array in self._arrays.items():
            array.take(rows, out=out[name], mode="clip")  # "raise" would buffer the output

    def select(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parameters of ``rows`` by name; see `param_fields`."""
        return {name: array[rows] for name, array in self._arrays.items()}

    def is_all_greedy(self, rows: np.ndarray) -> bool:
        """Return whether every one of ``rows`` is greedy."""
        return not self._arrays["temperature"][rows].any()

    def hints(self, rows: np.ndarray) -> SamplingHints:
        """Return what is known of ``rows`` together."""
        return SamplingHints(
            top_width=int(self._top_width[rows].max(initial=0)),
            has_min_p=bool(self._arrays["min_p"][rows].any()),
        )

    def edited(self, rows: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """Return which of ``rows`` cannot be sampled from the plain logits, as indices."""
        return np.flatnonzero(seq_lens < self._edited_below[rows])

    def has_logprobs(self, rows: np.ndarray) -> bool:
        """Return whether any of ``rows`` wants the log-probabilities of its tokens."""
        return bool(self._has_logprobs[rows].any())

    def _seed(self, req: Req) -> int:
        """Return the 64-bit seed of ``req``."""
        seed = req.sampling_params.seed
        return _mix(self._base_seed, req.uid) if seed is None else seed % 2**64

    def _hint_width(self, params: SamplingParams) -> int:
        """Return how many of the likeliest tokens the filters look at."""
        if params.is_greedy or (params.top_k == -1 and params.top_p >= 1.0):
            return 0
        return self._vocab_size if params.top_k == -1 else min(params.top_k, self._vocab_size)

    def _edit_limit(self, req: Req) -> int:
        """Return the seq_len from which on the plain logits do for ``req``."""
        params = req.sampling_params
        is_edited = self._is_always_edited or params.has_penalties or bool(params.logit_bias)
        return _INT32_MAX if is_edited else min(req.prompt_len + params.min_tokens, _INT32_MAX)


def param_fields(num_rows: int) -> list[Field]:
    """Return the packed fields that `RowParams.gather` fills."""
    return [Field(name, dtype, num_rows) for name, dtype in _PARAM_DTYPES.items()]


def sampling_inputs(views: dict[str, torch.Tensor], positions: torch.Tensor) -> SamplingInputs:
    """Make the sampler's inputs from a step's device views."""
    return SamplingInputs(positions=positions, **{name: views[name] for name in _PARAM_DTYPES})


def _mix(seed: int, uid: int) -> int:
    """Derive a 64-bit seed: the splitmix64 finaliser of Steele et al., OOPSLA 2014."""
    mask = 2**64 - 1
    z = (seed + (uid + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
