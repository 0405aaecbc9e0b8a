"""Decode: one query token per request, eagerly or inside captured graphs."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import flashinfer.decode
import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

from minisgl.core import Batch
from minisgl.errors import SettingsError
from minisgl_attn_flashinfer.page_lists import (
    StagingBuffer,
    fill_indices,
    num_reqs_of,
    seq_lens_of,
)
from minisgl_attn_flashinfer.planning import KV_LAYOUT, PlanConfig, Workspace

logger = logging.getLogger(__name__)

# Query heads per KV head that the CUDA-core kernel serves in every version since 0.6.
CUDA_CORE_GROUP_SIZES = (1, 2, 3, 4, 8)
# From here on tensor cores are quicker: the group fills enough rows of their tile.
TENSOR_CORES_FROM_GROUP_SIZE = 4
_SCHEDULE_BYTES = 8 << 20  # what a wrapper allocates for itself


@dataclass(frozen=True, slots=True)
class StagedDecode:
    """The lists of one batch in host memory, views of one staging buffer.

    Attributes:
        indptr: ``[num_rows + 1]`` int32.
        last_page_len: ``[num_rows]`` int32.
        indices: ``[num_indices]`` int32.
        packed: The part of the buffer that holds them all.
    """

    indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor
    packed: torch.Tensor


class DecodePlanner:
    """Owns the eager decode wrappers and those of every captured batch size.

    All captured sizes share one device buffer, laid out ``indptr | last_page_len | indices``, so
    that a replay costs one copy; a size uses the first rows of each part. They share the buffer
    of FlashInfer's schedule too: one size runs at a time, and it is planned before each replay.
    """

    def __init__(self, config: PlanConfig, workspace: Workspace) -> None:
        """Choose the kernel; wrappers are made when they are first needed.

        Raises:
            SettingsError: CUDA cores were asked for and do not serve this ratio of heads.
        """
        self._config = config
        self._workspace = workspace
        self._use_tensor_cores = wants_tensor_cores(config)
        self._staging = StagingBuffer(config.device)
        self._eager: list[Any] = []  # FlashInfer's classes are not annotated
        self._captured: dict[int, list[Any]] = {}  # by padded batch size; same reason
        self._fast_plan = find_fast_plan()
        self._max_rows = 0
        self._fixed = torch.empty(0, dtype=torch.int32)
        self._schedules: list[torch.Tensor] = []

    def plan(self, batch: Batch) -> list[Any]:
        """Plan a batch that runs outside graphs and return its wrappers, one per group."""
        config = self._config
        if not self._eager:
            self._eager = [self._make_wrapper() for _ in config.groups]
        num_rows = max(batch.padded_size, num_reqs_of(batch))
        staged = self._stage(batch, num_rows, num_rows)
        indices = self._staging.to_device(staged.indices)
        args = (staged.indptr, indices, staged.last_page_len, *config.shape)
        for wrapper, layer in zip(self._eager, config.groups, strict=True):
            self._workspace.run_plan(wrapper.plan, *args, **config.options(layer))
        self._staging.finish()
        return self._eager

    def init_graph(self, max_batch_size: int) -> None:
        """Allocate the buffers of batches of up to ``max_batch_size`` rows."""
        config = self._config
        # Requests may share pages, so the size of the pool is no bound.
        num_ints = 2 * max_batch_size + 1 + max_batch_size * config.max_pages_per_req
        self._max_rows = max_batch_size
        self._fixed = torch.zeros(num_ints, dtype=torch.int32, device=config.device)
        self._schedules = [
            torch.empty(_SCHEDULE_BYTES, dtype=torch.uint8, device=config.device)
            for _ in config.groups
        ]
        self._captured.clear()

    def plan_for_capture(self, batch: Batch) -> list[Any]:
        """Make the wrappers of this batch size, if there are none yet, and plan them in full.

        It also tries the short plan that replays use, which must make the same schedule.
        """
        size = batch.padded_size
        if size not in self._captured:
            self._captured[size] = [
                self._make_graph_wrapper(size, schedule) for schedule in self._schedules
            ]
        wrappers = self._captured[size]
        self._plan_graph(batch, wrappers, is_fast=False)
        if self._fast_plan is not None and not self._is_fast_plan_equal(batch, wrappers):
            logger.warning("fi: fast_decode_plan does not fit this FlashInfer; using plan instead")
            self._fast_plan = None
            self._plan_graph(batch, wrappers, is_fast=False)
        return wrappers

    def plan_for_replay(self, batch: Batch) -> list[Any]:
        """Bring the shared buffers and this size's schedule up to date."""
        wrappers = self._captured[batch.padded_size]
        self._plan_graph(batch, wrappers, is_fast=self._fast_plan is not None)
        return wrappers

    def _plan_graph(self, batch: Batch, wrappers: list[Any], *, is_fast: bool) -> None:
        config = self._config
        staged = self._stage(batch, batch.padded_size, self._max_rows)
        self._fixed[: staged.packed.numel()].copy_(staged.packed, non_blocking=True)
        start = 2 * self._max_rows + 1
        indices = self._fixed[start : start + staged.indices.numel()]
        args = (staged.indptr, indices, staged.last_page_len, *config.shape)
        for wrapper, layer in zip(wrappers, config.groups, strict=True):
            options = config.options(layer)
            if is_fast:
                # It leaves the device buffers alone, which hold the lists by now, and with the
                # host's indptr it reads nothing back from them.
                options["global_override_indptr_cpu"] = staged.indptr
                self._workspace.run_plan(self._fast_plan, wrapper, *args, **options)
            else:
                self._workspace.run_plan(wrapper.plan, *args, **options)
        self._staging.finish()

    def _is_fast_plan_equal(self, batch: Batch, wrappers: list[Any]) -> bool:
        """Whether the short plan can be called and lays its schedule out like the full one."""
        expected = [list(wrapper._plan_info) for wrapper in wrappers]
        try:
            self._plan_graph(batch, wrappers, is_fast=True)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            logger.info("fi: fast_decode_plan failed: %s", error)
            return False
        return [list(wrapper._plan_info) for wrapper in wrappers] == expected

    def _stage(self, batch: Batch, num_rows: int, max_rows: int) -> StagedDecode:
        """Write the lists of a batch to pinned memory, laid out for ``max_rows`` rows."""
        config = self._config
        seq_lens = seq_lens_of(batch, num_rows)
        num_pages = (seq_lens + (config.page_size - 1)) // config.page_size
        packed = self._staging.begin(2 * max_rows + 1 + int(num_pages.sum()))
        indptr, last_page_len, indices = packed.split(
            [max_rows + 1, max_rows, packed.numel() - 2 * max_rows - 1]
        )
        indptr, last_page_len = indptr[: num_rows + 1], last_page_len[:num_rows]
        bounds = indptr.numpy()
        bounds[0] = 0
        np.cumsum(num_pages, out=bounds[1:])
        last_page_len.numpy()[:] = seq_lens - (num_pages - 1) * config.page_size
        fill_indices(indices.numpy(), batch.host, num_pages, bounds, config.dummy_page)
        return StagedDecode(indptr, last_page_len, indices, packed)

    def _make_wrapper(self) -> Any:  # FlashInfer's class
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace.buffer(),
            KV_LAYOUT,
            use_tensor_cores=self._use_tensor_cores,
            backend="fa2",
        )

    def _make_graph_wrapper(
        self, num_rows: int, schedule: torch.Tensor
    ) -> Any:  # FlashInfer's class
        rows = self._max_rows
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace.buffer(),
            KV_LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=self._use_tensor_cores,
            paged_kv_indptr_buffer=self._fixed[: num_rows + 1],
            paged_kv_indices_buffer=self._fixed[2 * rows + 1 :],
            paged_kv_last_page_len_buffer=self._fixed[rows + 1 : rows + 1 + num_rows],
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(self._workspace.buffer(), schedule)
        return wrapper


def wants_tensor_cores(config: PlanConfig) -> bool:
    """Decide by the setting and by the ratio of heads.

    Raises:
        SettingsError: The setting excludes the only kernel that serves the ratio.
    """
    mode, group_size = config.settings.decode_tensor_cores, config.group_size
    is_served = group_size in CUDA_CORE_GROUP_SIZES
    if mode == "never" and not is_served:
        raise SettingsError(
            f"--fi.decode-tensor-cores never: CUDA cores serve "
            f"{', '.join(map(str, CUDA_CORE_GROUP_SIZES))} query heads per KV head, this model "
            f"has {group_size}; allowed: auto, always"
        )
    if mode == "auto":
        return not is_served or group_size >= TENSOR_CORES_FROM_GROUP_SIZE
    return mode == "always"


def find_fast_plan() -> Any:  # a function of FlashInfer
    """Return FlashInfer's short plan for graph wrappers, or ``None`` where it is not as known."""
    function = getattr(flashinfer.decode, "fast_decode_plan", None)
    is_known = (
        function is not None
        and "global_override_indptr_cpu" in inspect.signature(function).parameters
    )
    return function if is_known else None
