"""What ranks say to each other through host memory: messages, numbers, and who is where.

It goes over gloo on every device, so that a rank with nothing to do sleeps in a socket. The group
is made directly, not through ``torch.distributed.init_process_group``: that has one default group
per process, which belongs to whoever embeds us, and two engines need two.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minisgl.distributed.contract import CommConfig
from minisgl.distributed.links import link_to_first
from minisgl.distributed.meeting import meet, own_address
from minisgl.distributed.peers import PeerWatch, host_identity
from minisgl.errors import CommError

# Any: torch's stubs mark half of what its documentation lists as not exported, and give its
# backends no collectives. A plain import of the names would fail in builds without them.
_torch: Any = dist

_NEVER = timedelta(days=3650)  # an idle server says nothing for that long

# Most control messages fit into one frame of this size, so that they cost one collective.
_FRAME_BYTES = 512
_LENGTH_BYTES = 8

_PEER = struct.Struct("=16sq")


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a rank is.

    Attributes:
        rank: Its rank.
        pid: Its process id; of use where ``is_local``.
        is_local: Whether it is on this machine, and visible from this process.
    """

    rank: int
    pid: int
    is_local: bool


class ControlGroup:
    """The ranks of a group, as they reach each other's host memory.

    Attributes:
        rank: This process's rank.
        size: Ranks of the group.
        peers: Every rank, this one included, by rank.
    """

    def __init__(self, config: CommConfig) -> None:
        """Meet the other ranks.

        Raises:
            CommError: They did not all come within ``config.timeout_s``.
        """
        self.rank, self.size = config.rank, config.size
        self._store = meet(config)
        with as_comm_error():
            self._group = _gloo_group(_torch.PrefixStore("control/", self._store), config)
        self._broadcast_options = _torch.BroadcastOptions()
        self._broadcast_options.rootRank = 0
        self._broadcast_options.timeout = _NEVER
        self.peers = self._find_peers()
        self._links: list[socket.socket] = []
        if not config.init_method.startswith("file://"):
            self._links = link_to_first(self, config)

    def watch(self, on_lost: Callable[[], None], has_processes: bool) -> PeerWatch:
        """Begin to watch the other ranks; once, and whoever asks closes it.

        Args:
            on_lost: Called when one of them has ended; see `PeerWatch`.
            has_processes: Whether to watch processes of this machine too, which their launcher
                does anyway, but not as quickly as a GPU that waits for them would like.
        """
        local = [peer.pid for peer in self.peers if peer.is_local]
        return PeerWatch(local if has_processes else [], on_lost, self._links)

    @property
    def group(self) -> Any:  # Any: as above
        """Torch's process group, for tensors in host memory."""
        return self._group

    def store(self, name: str) -> Any:  # Any: as above
        """Return a part of the key-value store of the rendezvous, for a process group's own use."""
        return _torch.PrefixStore(f"{name}/", self._store)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Send bytes from rank 0; see `Communicator.broadcast_bytes`.

        A frame starts with the length; what does not fit into it follows.
        """
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

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the payload of each rank, by rank; all have the same length, above 0."""
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = torch.empty(self.size * len(payload), dtype=torch.uint8)
        with as_comm_error():
            options = _torch.distributed_c10d.AllgatherOptions()
            wait(self._group._allgather_base(parts, sent, options))
        return [part.numpy().tobytes() for part in parts.split(len(payload))]

    def min_int(self, value: int) -> int:
        """Return the smallest value of any rank."""
        tensor = torch.tensor([value], dtype=torch.int64)
        options = _torch.AllreduceOptions()
        options.reduceOp = _torch.ReduceOp.MIN
        with as_comm_error():
            wait(self._group.allreduce([tensor], options))
        return int(tensor)

    def shutdown(self) -> None:
        """Leave the group; other ranks' calls fail from then on. Safe to call twice."""
        self._group.shutdown()
        for link in self._links:
            link.close()

    def _broadcast(self, data: torch.Tensor) -> None:
        with as_comm_error():
            wait(self._group.broadcast([data], self._broadcast_options))

    def _find_peers(self) -> tuple[Peer, ...]:
        mine = host_identity()
        found = map(_PEER.unpack, self.gather_bytes(_PEER.pack(mine, os.getpid())))
        return tuple(Peer(rank, pid, host == mine) for rank, (host, pid) in enumerate(found))


def wait(work: Any) -> None:  # Any: as above
    """Wait for a collective; one that is not asynchronous may leave nothing to wait for."""
    if work is not None:
        work.wait()


@contextmanager
def as_comm_error() -> Iterator[None]:
    """Give torch's error, which it raises when a peer is gone, a name of ours."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(f"another rank is gone or late: {_brief(error)}") from error


def _brief(error: RuntimeError) -> str:
    """Leave out where in torch's sources it was raised, and its advice."""
    return re.sub(r"^\[\S*\] ", "", str(error)).partition(" This is ")[0]


def _gloo_group(store: Any, config: CommConfig) -> Any:  # Any: as above
    """Make the group for tensors in host memory."""
    options = _torch.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=config.timeout_s)
    address = own_address(config.init_method)
    options._devices = [_torch.ProcessGroupGloo.create_device(hostname=address)]
    return _torch.ProcessGroupGloo(store, config.rank, config.size, options)
