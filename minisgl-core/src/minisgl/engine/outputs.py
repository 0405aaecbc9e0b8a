"""Sampled tokens on their way back to the host."""

from __future__ import annotations

import torch

from minisgl.device import Event, empty_host
from minisgl.engine.contract import ForwardOutput, StepResult
from minisgl.engine.logprobs import PendingLogprobs, PendingScores

_RING = 3  # the host reads the result of step n while step n + 1 runs


class LaunchedStep(ForwardOutput):
    """A step whose tokens are being copied to the host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        event: Event,
        logprobs: PendingLogprobs | None,
        scores: PendingScores | None,
    ) -> None:
        """Take the pinned ``[num_sampled]`` int32 view that the copy fills, and its event."""
        self._tokens = tokens
        self._event = event
        self._logprobs = logprobs
        self._scores = scores

    def wait(self) -> StepResult:
        """Wait for the copy."""
        self._event.synchronize()
        return StepResult(
            token_ids=self._tokens.numpy().copy(),
            logprobs={} if self._logprobs is None else self._logprobs.collect(),
            scores=[] if self._scores is None else self._scores.collect(),
        )


class OutputRing:
    """Pinned buffers that take the tokens of successive steps."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        """Allocate the ring."""
        self._buffers = [
            (empty_host(4 * max_rows, device).view(torch.int32), Event(device))
            for _ in range(_RING)
        ]
        self._next = 0

    def launch(
        self,
        tokens: torch.Tensor,
        logprobs: PendingLogprobs | None,
        scores: PendingScores | None = None,
    ) -> LaunchedStep:
        """Submit the copy of ``[num_sampled]`` int32 tokens; their memory may be reused after."""
        buffer, event = self._buffers[self._next]
        self._next = (self._next + 1) % _RING
        host = buffer[: tokens.shape[0]]
        host.copy_(tokens, non_blocking=True)
        event.record()
        return LaunchedStep(host, event, logprobs, scores)
