"""The kit's attention case as the tests of the GPU plugins use it: half types and whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.contract import AttentionBackend
from minisgl.core import Batch
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import Step

__all__ = [
    "AttentionCase",
    "CaseShape",
    "ReplayedDecode",
    "Step",
    "assert_near",
    "replay_by_calling",
]


@dataclass(frozen=True, slots=True)
class CaseShape(AttentionShape):
    """Sizes of a case in the type that the GPU libraries have."""

    dtype: torch.dtype = torch.bfloat16


class ReplayedDecode:
    """All layers' decode, captured for a size over fixed tensors and replayed.

    ``capture`` makes the graph: on a CPU it calls the function again, which reads nothing but the
    batch that was captured.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        case: AttentionCase,
        size: int,
        capture: Callable[[Callable[[], list[Tensor]]], Callable[[], list[Tensor]]],
    ) -> None:
        """Capture ``size`` rows of padding."""
        self._backend, self._case, self._size = backend, case, size
        self._fixed = case.decode([], size)
        self._q = case.queries(size).contiguous()
        backend.prepare_for_capture(self._fixed)
        layers = range(len(case.shape.windows))
        fixed, q = self._fixed, self._q
        self._replay = capture(lambda: [backend.forward(q, i, fixed) for i in layers])

    def load(self, batch: Batch, q: Tensor) -> Batch:
        """Copy a batch into the fixed tensors, as an engine does, and let it refer to them."""
        for name in ("table_idx", "seq_lens"):
            getattr(self._fixed, name).copy_(getattr(batch, name))
            setattr(batch, name, getattr(self._fixed, name))
        batch.cu_seqlens_q = self._fixed.cu_seqlens_q
        self._q[: len(q)] = q
        return batch

    def run(self, rows: Sequence[Step], q: Tensor) -> list[Tensor]:
        """Replay with real requests; returns ``[size, heads, head_dim]`` of every layer."""
        return self.run_batch(self._case.decode(rows, self._size), q)

    def run_batch(self, batch: Batch, q: Tensor) -> list[Tensor]:
        """Replay a batch that was made before."""
        self._backend.prepare_for_replay(self.load(batch, q))
        return self.replay()

    def replay(self) -> list[Tensor]:
        """Replay over what is in the fixed tensors."""
        return self._replay()


def assert_near(out: Tensor, expected: Tensor, tolerance: float = 1e-2) -> None:
    """Compare a half-precision result with the reference in higher precision.

    A hundredth covers the rounding of the output to the 8 bits of bfloat16, of values below
    about 4; kernels that round the weights too need twice that.
    """
    torch.testing.assert_close(
        out.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance
    )


def replay_by_calling(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Stand in for a graph on a CPU: warm up, then call again at each replay."""
    step()
    return step
