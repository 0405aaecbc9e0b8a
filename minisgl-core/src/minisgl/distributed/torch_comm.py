"""Collectives through torch's process groups: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minisgl.distributed.contract import CommConfig, Communicator
from minisgl.distributed.control import ControlGroup, as_comm_error, wait
from minisgl.distributed.peers import RANK_ENDED, attempt
from minisgl.distributed.single import SingleCommunicator
from minisgl.errors import CommError

# Any: as in `minisgl.distributed.control`.
_torch: Any = dist

_ABORT_S = 5.0  # NCCL's own end may hang, where graphs still refer to it


class TorchCommunicator(Communicator):
    """Process groups over all ranks; control data always goes over gloo."""

    def __init__(self, config: CommConfig) -> None:
        """Meet the other ranks.

        Raises:
            CommError: They did not all come within ``config.timeout_s``.
        """
        self.rank, self.size = config.rank, config.size
        self._control = ControlGroup(config)
        self._data = self._control.group
        self._is_broken = False
        # Not asynchronous: on a GPU the work then goes to the current stream, not to one aside.
        self._sum_options = _torch.AllreduceOptions()
        self._sum_options.asyncOp = False
        self._gather_options = _torch.distributed_c10d.AllgatherOptions()
        self._gather_options.asyncOp = False
        self._on_lost = config.on_lost
        is_cuda = config.device.type == "cuda"
        if is_cuda:
            self._data = _nccl_group(self._control.store("data"), config)
        self._watch = self._control.watch(self._break, has_processes=is_cuda)
        if is_cuda:
            # Its buffers are made by the first collective, and are to be there when whoever sizes
            # the KV pool looks how much memory is left.
            self.all_reduce(torch.zeros(1, device=config.device))
            torch.cuda.synchronize(config.device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place where the tensor is contiguous."""
        tensor = tensor.contiguous()
        with as_comm_error():
            wait(self._data.allreduce([tensor], self._sum_options))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate over ranks along the last dimension."""
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        with as_comm_error():
            wait(self._data._allgather_base(parts, tensor, self._gather_options))
        return join_parts(parts.view(self.size, *tensor.shape))

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Send bytes from rank 0 over gloo."""
        return self._control.broadcast_bytes(payload)

    def min_int(self, value: int) -> int:
        """Reduce over gloo."""
        return self._control.min_int(value)

    def raise_if_broken(self) -> None:
        """Raise once another rank is seen to have ended; NCCL was called off then."""
        if self._is_broken:
            raise CommError(RANK_ENDED)

    def shutdown(self) -> None:
        """Leave the group; other ranks' calls fail from then on."""
        self._watch.close()
        if self._data is not self._control.group and not self._is_broken:
            # Not an orderly end, which a GPU that still waits for a dead rank would block.
            attempt(self._data.abort, _ABORT_S)
            self._data = self._control.group
        self._control.shutdown()

    def _break(self) -> None:
        """Let the GPU wait no longer for a rank that is gone; runs in the thread that watches."""
        self._is_broken = True
        if self._data is not self._control.group:
            attempt(self._data.abort, _ABORT_S)
        if self._on_lost is not None:
            self._on_lost()


def build_communicator(config: CommConfig) -> Communicator:
    """Build the communicator for ``config.size`` ranks."""
    return SingleCommunicator() if config.size == 1 else TorchCommunicator(config)


def join_parts(parts: torch.Tensor) -> torch.Tensor:
    """Put the ranks' parts ``[size, ..., n]`` side by side: ``[..., size * n]``, contiguous."""
    return parts.movedim(0, -2).flatten(-2)


def _nccl_group(store: Any, config: CommConfig) -> Any:  # Any: as above
    """Make the group for tensors on GPUs."""
    options = _torch.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=config.timeout_s)
    return _torch.ProcessGroupNCCL(store, config.rank, config.size, options)
