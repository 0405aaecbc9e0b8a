"""How many KV pages an engine has, and what limits follow from that."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from minisgl.config.sections import EngineSettings
from minisgl.device import free_memory_bytes
from minisgl.errors import SettingsError
from minisgl.kvcache.pool import PoolShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory of the device when the engine started, before weights were loaded.

    Attributes:
        device: The device.
        free_bytes: Free bytes then; unused on a CPU.
    """

    device: torch.device
    free_bytes: int

    @classmethod
    def measure(cls, device: torch.device) -> MemoryBudget:
        """Look at the device now."""
        return cls(device, free_memory_bytes(device) if device.type == "cuda" else 0)

    def pool_bytes(self, settings: EngineSettings) -> int:
        """Return the bytes that the KV pool may take, now that weights are loaded."""
        if self.device.type != "cuda":
            return settings.cpu_kv_cache_bytes
        used = self.free_bytes - free_memory_bytes(self.device)
        return int(self.free_bytes * settings.memory_ratio) - used


def count_pages(
    budget: MemoryBudget,
    settings: EngineSettings,
    shape: PoolShape,
    dtype: torch.dtype,
    max_seq_len: int,
) -> int:
    """Return how many pages this rank can have.

    Args:
        budget: Memory at start.
        settings: ``num_pages`` wins where it is set.
        shape: The pool; its ``num_pages`` is ignored.
        dtype: Of keys and values.
        max_seq_len: Most tokens of a request; more pages than all rows can fill are of no use.

    Raises:
        SettingsError: Not even one page fits.
    """
    if settings.num_pages is not None:
        return settings.num_pages
    page_bytes = shape.page_bytes(dtype)
    num_pages = budget.pool_bytes(settings) // page_bytes - 1  # one is the dummy page
    if num_pages < 1:
        flag = "memory-ratio" if budget.device.type == "cuda" else "cpu-kv-cache-bytes"
        raise SettingsError(
            f"--{flag}: leaves no room for the KV cache, a page of which takes {page_bytes} bytes; "
            "allow more, or run a smaller model"
        )
    useful = settings.max_running_requests * -(-max_seq_len // shape.page_size)
    return min(num_pages, useful)
