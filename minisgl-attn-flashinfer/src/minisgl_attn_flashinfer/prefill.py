"""Prefill: any number of query tokens per request over the paged pool."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from minisgl.attention.contract import LayerAttention
from minisgl.core import Batch
from minisgl.device import compute_capability
from minisgl.errors import SettingsError
from minisgl_attn_flashinfer.modules import attention_module, find_installation
from minisgl_attn_flashinfer.page_lists import StagingBuffer, fill_indices
from minisgl_attn_flashinfer.planning import KV_LAYOUT, PlanConfig, Workspace

logger = logging.getLogger(__name__)

_FA3_CAPABILITY = 90


class PrefillPlanner:
    """Owns one prefill wrapper per group of layers."""

    def __init__(self, config: PlanConfig, workspace: Workspace) -> None:
        """Check the setting; wrappers are made at the first plan.

        Raises:
            SettingsError: fa3 was asked for on a GPU that does not run it.
        """
        self._config = config
        self._workspace = workspace
        self._staging = StagingBuffer(config.device)
        self._wrappers: list[Any] = []  # FlashInfer's classes are not annotated
        sm = compute_capability(config.device)
        if config.settings.prefill_backend == "fa3" and sm != _FA3_CAPABILITY:
            raise SettingsError(
                f"--fi.prefill-backend fa3: needs compute capability 9.0, this device has "
                f"{'none' if sm is None else sm / 10}; allowed: auto, fa2"
            )

    def plan(self, batch: Batch) -> list[Any]:
        """Plan a batch and return its wrappers, one per group."""
        config, host = self._config, batch.host
        assert host is not None, "a prefill batch comes with the scheduler's arrays"
        if not self._wrappers:
            self._wrappers = [self._make_wrapper(layer) for layer in config.groups]
        num_reqs = len(host.table_idx)
        num_pages = (host.seq_lens + (config.page_size - 1)) // config.page_size
        num_indices = int(num_pages.sum())
        staged = self._staging.begin(4 * num_reqs + 2 + num_indices)
        lists = staged.split([num_reqs + 1, num_reqs + 1, num_reqs, num_reqs, num_indices])
        qo_indptr, indptr, last_page_len, seq_lens, indices = (part.numpy() for part in lists)
        qo_indptr[0] = indptr[0] = 0
        seq_lens[:] = host.seq_lens
        np.cumsum(seq_lens - host.cached_lens, out=qo_indptr[1:])
        np.cumsum(num_pages, out=indptr[1:])
        last_page_len[:] = seq_lens - (num_pages - 1) * config.page_size
        fill_indices(indices, host, num_pages, indptr, config.dummy_page)
        # Lengths go in as host tensors, from which FlashInfer makes its schedule; only the page
        # numbers are wanted on the device alone. The sequence lengths it would otherwise make for
        # itself, and copy from memory that is not pinned.
        args = (lists[0], lists[1], self._staging.to_device(lists[4]), lists[2], *config.shape)
        for wrapper, layer in zip(self._wrappers, config.groups, strict=True):
            options = config.options(layer) | {"causal": True, "seq_lens": lists[3]}
            self._workspace.run_plan(wrapper.plan, *args, **options)
        # Covers the wrappers' own pinned buffers too: the next plan waits for it.
        self._staging.finish()
        return self._wrappers

    def _make_wrapper(self, layer: LayerAttention) -> Any:  # FlashInfer's class
        backend = self._pick_backend(layer)
        return BatchPrefillWithPagedKVCacheWrapper(
            self._workspace.buffer(), KV_LAYOUT, backend=backend
        )

    def _pick_backend(self, layer: LayerAttention) -> str:
        """Resolve ``auto``: fa3 where it runs and no compiler has to be waited for."""
        config = self._config
        if config.settings.prefill_backend != "auto":
            return config.settings.prefill_backend
        dtype = str(config.dtype).removeprefix("torch.")
        name = attention_module("prefill_fa3", dtype, config.head_dim, layer.window_left >= 0)
        found = find_installation()
        is_built = found is not None and found.has_module(name)
        backend = (
            "fa3" if is_built and compute_capability(config.device) == _FA3_CAPABILITY else "fa2"
        )
        logger.info("fi: prefill by %s", backend)
        return backend
