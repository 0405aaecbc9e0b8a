"""Collectives ``cuda``: our kernels for small messages, our own NCCL communicator for the others.

Everything is submitted to the current stream, and captured with it.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch
from torch import Tensor

from minisgl.device import empty_host
from minisgl.distributed.contract import AllReduceAddNorm, CommConfig, Communicator
from minisgl.distributed.control import ControlGroup
from minisgl.distributed.peers import RANK_ENDED, attempt
from minisgl.distributed.single import SingleCommunicator
from minisgl.errors import CommError, PluginError
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.nccl import NcclCommunicator, load_nccl
from minisgl_kernels_cuda.peer_memory import PeerMemory, can_share
from minisgl_kernels_cuda.peer_reduce import (
    DEFAULT_LIMITS,
    NUM_RANKS,
    Limits,
    PeerGroup,
    PeerReduce,
    memory_bytes,
)
from minisgl_kernels_cuda.settings import CudaKernelSettings, cache_folder
from minisgl_kernels_cuda.units import MACROS, piece_size

logger = logging.getLogger(__name__)

_LOST, _TOO_LATE = 0, 1  # places in the verdict
_ABORT_S = 5.0
# The trial of the kernels: how long they wait, and elements of a message, in rows for the norm.
_TRIAL_S, _TRIAL_SIZE, _TRIAL_ROW = 10.0, 8192, 1024


class CudaCommunicator(Communicator):
    """One rank of a group of GPUs."""

    def __init__(self, config: CommConfig) -> None:
        """Meet the other ranks, and make what they share.

        Raises:
            CommError: They did not all come within ``config.timeout_s``.
            PluginError: NCCL is missing, or the driver refused.
        """
        self.rank, self.size = config.rank, config.size
        self._device = config.device
        self._timeout_s = config.timeout_s
        library = load_nccl()
        self._control = ControlGroup(config)
        torch.cuda.set_device(config.device)
        unique_id = self._control.broadcast_bytes(library.unique_id() if not self.rank else None)
        self._nccl = NcclCommunicator(library, library.join(unique_id, self.rank, self.size))
        self._memory: PeerMemory | None = None
        self._kernels: PeerReduce | None = None
        # Written by the kernels too: see sources/peers.cuh.
        pinned = empty_host(8, config.device).view(torch.int32).zero_()
        self._pinned: Tensor | None = pinned
        self._verdict = (ctypes.c_int32 * 2).from_address(pinned.data_ptr())
        self._make_kernels(config)
        index = config.device.index
        self._index = torch.cuda.current_device() if index is None else index
        # torch.cuda.current_stream() makes an object and costs more than a launch.
        self._stream_of: Any = torch._C._cuda_getCurrentRawStream  # torch has no stub for it
        self._on_lost = config.on_lost
        self._watch = self._control.watch(self._break, has_processes=True)
        # NCCL's buffers are made by the first collective, and are to be there when whoever sizes
        # the KV pool looks how much memory is left.
        self._nccl.all_reduce(torch.zeros(1, device=config.device), self._stream())
        torch.cuda.synchronize(config.device)

    @property
    def all_reduce_add_norm(self) -> AllReduceAddNorm | None:
        """The fused kernel, where GPUs reach each other's memory."""
        return None if self._kernels is None else self._kernels.all_reduce_add_norm

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place where the tensor is contiguous."""
        tensor = tensor.contiguous()
        if self._kernels is None or not self._kernels.all_reduce(tensor):
            self._nccl.all_reduce(tensor, self._stream())
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate over ranks along the last dimension."""
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.size, *tensor.shape))
        self._nccl.all_gather(parts, tensor, self._stream())
        return parts.movedim(0, -2).flatten(-2)  # [..., size * n]

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Send bytes from rank 0 over gloo."""
        return self._control.broadcast_bytes(payload)

    def min_int(self, value: int) -> int:
        """Reduce over gloo."""
        return self._control.min_int(value)

    def raise_if_broken(self) -> None:
        """Raise once another rank is seen to have ended, or a kernel has waited in vain."""
        if self._verdict[_LOST]:
            raise CommError(RANK_ENDED)
        if self._verdict[_TOO_LATE]:
            raise CommError(
                f"--distributed-timeout-s {self._timeout_s:g}: another rank did not come to a "
                "collective in time"
            )

    def shutdown(self) -> None:
        """Leave the group; the caller's stream has nothing left to do."""
        self._watch.close()
        attempt(self._nccl.abort, _ABORT_S)
        self._control.shutdown()
        if self._memory is not None and not self._verdict[_LOST]:
            self._memory.close()
        self._memory = None

    def _stream(self) -> int:
        stream: int = self._stream_of(self._index)
        return stream

    def _make_kernels(self, config: CommConfig) -> None:
        """Share memory and load the kernels, where every rank can."""
        settings = config.settings
        if not isinstance(settings, CudaKernelSettings):
            settings = CudaKernelSettings()
        limits = limits_for(settings, config.size)
        is_served = config.size in NUM_RANKS and config.dtype in MACROS and limits.by_parts_bytes
        if not is_served or not can_share(self._control, config.device):
            logger.info("all-reduce: NCCL")
            return
        size = device_size(config.device)
        capability = torch.cuda.get_device_capability(config.device)
        has_pdl = capability >= (9, 0) and settings.pdl != "off"
        compiler = Compiler(size.arch, cache_folder(settings.cache_dir))
        self._memory = PeerMemory(self._control, config.device, memory_bytes(config.size))
        group = PeerGroup(
            self.rank, self._memory.addresses, ctypes.addressof(self._verdict), config.timeout_s
        )
        loader = DeviceLoader(config.device, compiler, has_pdl)
        kernels = PeerReduce(loader, config.dtype, group, limits)
        # Half, so that this rank has an answer for the others before they wait for it in vain.
        timeout_s = min(_TRIAL_S, config.timeout_s / 2)
        if not self._sums_are_right(kernels.with_timeout(timeout_s), config):
            logger.warning(
                "--comm cuda: the driver says that the GPUs write each other's memory, but sums "
                "over it are wrong or took more than %g s; all-reduce: NCCL, which is slower for "
                "small messages",
                timeout_s,
            )
            self._memory.close()
            self._memory = None
            return
        self._kernels = kernels
        logger.info(
            "all-reduce: at once up to %d KiB, by parts up to %d KiB, then NCCL",
            limits.at_once_bytes >> 10,
            limits.by_parts_bytes >> 10,
        )

    def _sums_are_right(self, kernels: PeerReduce, config: CommConfig) -> bool:
        """Whether the kernels add up on every rank; all ranks call it.

        Some virtual machines and I/O memory units let a driver promise access that fails silently.
        """
        self._control.min_int(1)  # compiling takes ranks unequally long
        places = torch.arange(_TRIAL_SIZE, device=config.device) % 7
        expected = self.size * places + sum(range(self.size))  # exact in every dtype
        terms = (places + self.rank).to(config.dtype).repeat(3, 1)
        num_pieces = _TRIAL_SIZE // piece_size(config.dtype)
        kernels.sum_at_once(terms[0], num_pieces)
        kernels.sum_by_parts(terms[1], num_pieces)
        rows = terms[2].view(-1, _TRIAL_ROW)
        residual, weight = torch.zeros_like(rows), torch.ones_like(rows[0])
        is_fused = kernels.all_reduce_add_norm(rows, residual, weight, 1e-6) is not None
        terms[2] = residual.flatten() if is_fused else expected
        is_right = bool((terms == expected).all())
        self._verdict[_TOO_LATE] = 0  # a trial that was is no reason for raise_if_broken to raise
        return self._control.min_int(int(is_right)) == 1

    def _break(self) -> None:
        """Let the GPU wait no longer for a rank that is gone; runs in the thread that watches."""
        self._verdict[_LOST] = 1
        attempt(self._nccl.abort, _ABORT_S)
        if self._on_lost is not None:
            self._on_lost()


def build_communicator(config: CommConfig) -> Communicator:
    """Build the communicator of a group of GPUs.

    Raises:
        PluginError: The group is no such group.
        CommError: As for `CudaCommunicator`.
    """
    if config.size == 1:
        return SingleCommunicator()
    if config.device.type != "cuda":
        raise PluginError(f"--comm cuda: joins GPUs, not {config.device.type}; use --comm torch")
    return CudaCommunicator(config)


def limits_for(settings: CudaKernelSettings, num_ranks: int) -> Limits:
    """Return which kernel serves which size: what the settings say, else what was measured."""
    measured = DEFAULT_LIMITS.get(num_ranks, Limits(0, 0))
    at_once, by_parts = settings.reduce_at_once_bytes, settings.reduce_by_parts_bytes
    at_once_bytes = measured.at_once_bytes if at_once is None else at_once
    by_parts_bytes = measured.by_parts_bytes if by_parts is None else by_parts
    return Limits(at_once_bytes, max(at_once_bytes, by_parts_bytes))
