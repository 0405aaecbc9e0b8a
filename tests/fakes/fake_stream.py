"""A device that runs behind the host, in one process and on a CPU.

Work is run at once, or, between `FakeStream.defer` and the next wait, only when someone waits for
it: the worst case of a host that runs ahead. A copy that finds its host memory changed since it
was submitted raises, which is what a real device would turn into wrong results or a crash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class HostMemoryOverwrittenError(AssertionError):
    """Host memory was written to while a copy from it was still in flight."""


class FakeStream:
    """A queue of device work."""

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] = deque()
        self._num_done = 0
        self._is_deferred = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run work, at once or when it is waited for."""
        if self._is_deferred:
            self._pending.append(work)
        else:
            work()
            self._num_done += 1

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Submit an asynchronous copy from host memory."""
        expected = source.clone()

        def work() -> None:
            if not torch.equal(source, expected):
                raise HostMemoryOverwrittenError("host memory was changed before its copy had run")
            target.copy_(source)

        self.submit(work)

    @property
    def position(self) -> int:
        """How much work has been submitted since the start."""
        return self._num_done + len(self._pending)

    def wait(self, position: int | None = None) -> None:
        """Run all work up to a position, or all there is."""
        end = self.position if position is None else position
        while self._num_done < end:
            self._pending.popleft()()
            self._num_done += 1

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Let the host run ahead inside the block; torch's own copies too."""
        self._is_deferred = True
        try:
            with _AsyncCopies(self):
                yield
            self.wait()
        finally:
            self._is_deferred = False
            self._pending.clear()


class FakeEvent:
    """Like `minisgl.device.Event`, on the fake stream."""

    def __init__(self, device: torch.device) -> None:
        del device
        self._position = 0

    def record(self) -> None:
        self._position = STREAM.position

    def synchronize(self) -> None:
        STREAM.wait(self._position)


class _AsyncCopies(TorchFunctionMode):
    """Puts ``copy_(…, non_blocking=True)`` on the stream."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self,
        func: Any,  # signature of torch's hook
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        options = kwargs or {}
        if func is torch.Tensor.copy_ and options.get("non_blocking"):
            self._stream.copy(args[0], args[1])
            return args[0]
        return func(*args, **options)


# One per process, as a device has one current stream: libraries find it without being told.
STREAM = FakeStream()
