"""Collectives through torch's process groups: gloo between CPU processes, NCCL between GPUs.

The groups are made directly, not through ``torch.distributed.init_process_group``: that has one
default group per process, which belongs to whoever embeds us, and two engines need two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minisgl.distributed.contract import CommConfig, Communicator
from minisgl.errors import CommError

# Any: torch's stubs mark half of what its documentation lists as not exported, and give its
# backends no collectives. A plain import of the names would fail in builds without them.
_torch: Any = dist

_NEVER = timedelta(days=3650)  # an idle server says nothing for that long
_POLL_S = 0.02
_STORE_TIMEOUT = timedelta(seconds=2)
_CALLED_OFF = "called off"

# Most control messages fit into one frame of this size, so that they cost one collective.
_FRAME_BYTES = 512
_LENGTH_BYTES = 8


class SingleCommunicator(Communicator):
    """The group of one: nothing to communicate."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Return the payload."""
        assert payload is not None, "rank 0 passes the payload"
        return payload

    def min_int(self, value: int) -> int:
        """Return the value."""
        return value

    def shutdown(self) -> None:
        """Do nothing."""


class TorchCommunicator(Communicator):
    """Process groups over all ranks; control data always goes over gloo."""

    def __init__(self, config: CommConfig) -> None:
        """Meet the other ranks.

        Raises:
            CommError: They did not all come within ``config.timeout_s``.
        """
        self.rank, self.size = config.rank, config.size
        store = _meet(config)
        with _as_comm_error():
            self._control = _gloo_group(_torch.PrefixStore("control/", store), config)
            self._data = self._control
            if config.device.type == "cuda":
                self._data = _nccl_group(_torch.PrefixStore("data/", store), config)
        # Not asynchronous: on a GPU the work then goes to the current stream, not to one aside.
        self._sum_options = _torch.AllreduceOptions()
        self._sum_options.asyncOp = False
        self._gather_options = _torch.distributed_c10d.AllgatherOptions()
        self._gather_options.asyncOp = False
        self._broadcast_options = _torch.BroadcastOptions()
        self._broadcast_options.rootRank = 0
        self._broadcast_options.timeout = _NEVER

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place where the tensor is contiguous."""
        tensor = tensor.contiguous()
        with _as_comm_error():
            _wait(self._data.allreduce([tensor], self._sum_options))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate over ranks along the last dimension."""
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        with _as_comm_error():
            _wait(self._data._allgather_base(parts, tensor, self._gather_options))
        parts = parts.view(self.size, *tensor.shape)  # [size, ..., n]
        return parts.movedim(0, -2).flatten(-2)  # [..., size * n]

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Send bytes from rank 0 over gloo: a frame that starts with the length, then the rest."""
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        if payload is not None:
            head = len(payload).to_bytes(_LENGTH_BYTES, "little")
            head += payload[: _FRAME_BYTES - _LENGTH_BYTES]
            frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(frame)
        head = frame.numpy().tobytes()
        size = int.from_bytes(head[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + size
        if end <= _FRAME_BYTES:
            return head[_LENGTH_BYTES:end]
        rest = torch.empty(end - _FRAME_BYTES, dtype=torch.uint8)
        if payload is not None:
            rest = torch.frombuffer(bytearray(payload[-len(rest) :]), dtype=torch.uint8)
        self._broadcast(rest)
        return head[_LENGTH_BYTES:] + rest.numpy().tobytes()

    def min_int(self, value: int) -> int:
        """Reduce over gloo."""
        tensor = torch.tensor([value], dtype=torch.int64)
        options = _torch.AllreduceOptions()
        options.reduceOp = _torch.ReduceOp.MIN
        with _as_comm_error():
            _wait(self._control.allreduce([tensor], options))
        return int(tensor)

    def shutdown(self) -> None:
        """Leave the group; other ranks' calls fail from then on."""
        if self._data is not self._control:
            self._data.abort()  # a GPU that still waits for a dead rank would block an orderly end
        self._control.shutdown()

    def _broadcast(self, data: torch.Tensor) -> None:
        with _as_comm_error():
            _wait(self._control.broadcast([data], self._broadcast_options))


def build_communicator(config: CommConfig) -> Communicator:
    """Build the communicator for ``config.size`` ranks."""
    return SingleCommunicator() if config.size == 1 else TorchCommunicator(config)


def call_off_meeting(init_method: str, reason: str) -> None:
    """Let ranks that wait at a ``file://`` rendezvous, or are yet to come, give up.

    For whoever started them, when one of them will not come.
    """
    path = Path(init_method.removeprefix("file://"))
    if path.parent.exists():  # else all is over already
        _torch.FileStore(str(path), -1).set(_CALLED_OFF, reason)


def _meet(config: CommConfig) -> Any:  # Any: as above
    """Wait until every rank has come to the rendezvous.

    Raises:
        CommError: Some did not come in time, or the meeting was called off.
    """
    deadline = time.monotonic() + config.timeout_s
    timeout = timedelta(seconds=config.timeout_s)
    with _as_comm_error():
        store, _, _ = next(
            _torch.rendezvous(
                config.init_method,
                config.rank,
                config.size,
                timeout=timeout,
            )
        )
        # A file that has been removed would be waited for as long as for a rank.
        store.set_timeout(min(timeout, _STORE_TIMEOUT))
        store.set(f"rank {config.rank}", "here")
        missing = list(range(config.size))
        while True:
            missing = [rank for rank in missing if not store.check([f"rank {rank}"])]
            if not missing:
                store.set_timeout(timeout)
                return store
            if store.check([_CALLED_OFF]):
                raise CommError(f"the ranks do not meet: {store.get(_CALLED_OFF).decode()}")
            if time.monotonic() > deadline:
                raise CommError(
                    f"--distributed-timeout-s {config.timeout_s:g}: rank {config.rank} waited for "
                    f"ranks that did not come: {', '.join(map(str, missing))}"
                )
            time.sleep(_POLL_S)


def _gloo_group(store: Any, config: CommConfig) -> Any:  # Any: as above
    """Make the group for tensors in host memory."""
    options = _torch.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=config.timeout_s)
    # Ranks that met at a file are on one machine: no other one needs to reach them, and a host
    # whose own name does not resolve is no hindrance.
    is_local = config.init_method.startswith("file://")
    options._devices = [
        _torch.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if is_local
        else _torch.ProcessGroupGloo.create_default_device()
    ]
    return _torch.ProcessGroupGloo(store, config.rank, config.size, options)


def _nccl_group(store: Any, config: CommConfig) -> Any:  # Any: as above
    """Make the group for tensors on GPUs."""
    options = _torch.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=config.timeout_s)
    return _torch.ProcessGroupNCCL(store, config.rank, config.size, options)


def _wait(work: Any) -> None:  # Any: as above
    """Wait for a collective; one that is not asynchronous may leave nothing to wait for."""
    if work is not None:
        work.wait()


@contextmanager
def _as_comm_error() -> Iterator[None]:
    """Give torch's error, which it raises when a peer is gone, a name of ours."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(f"another rank is gone or late: {error}") from error
