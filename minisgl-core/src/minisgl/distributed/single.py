"""The group of one rank."""

from __future__ import annotations

from torch import Tensor

from minisgl.distributed.contract import Communicator


class SingleCommunicator(Communicator):
    """The group of one: nothing to communicate."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
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
