"""The attention backend ``fa``."""

from __future__ import annotations

import logging

import torch

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.core import Batch
from minisgl.device import compute_capability
from minisgl.errors import PluginError, SettingsError
from minisgl.plugin.spec import ProbeContext
from minisgl_attn_fa.adapters import build_adapter
from minisgl_attn_fa.generations import Generation, choose
from minisgl_attn_fa.metadata import StepMetadata
from minisgl_attn_fa.settings import FlashAttentionSettings

logger = logging.getLogger(__name__)


class FlashAttentionBackend(AttentionBackend):
    """Hands the engine's page table to FlashAttention; nothing is planned on the host."""

    def __init__(self, config: AttentionConfig) -> None:
        """Choose a generation and import it.

        Raises:
            PluginError: None that serves this GPU is installed, or it cannot be imported.
            SettingsError: The page size or the version asked for does not fit.
        """
        settings = config.settings or FlashAttentionSettings()
        if not isinstance(settings, FlashAttentionSettings):
            raise SettingsError(
                f"fa: settings are {type(settings).__name__}; allowed: FlashAttentionSettings"
            )
        sm = compute_capability(config.device)
        generation = pick_generation(config, sm, settings.version)
        self._adapter = build_adapter(generation, sm or 0, settings.num_splits)
        self._layers = config.layers
        self._page_size = config.context.page_size
        self._page_table = config.context.page_table
        self._max_pages = min(-(-config.max_seq_len // self._page_size), self._page_table.shape[1])
        pool = config.context.kv_pool
        self._caches = [(pool.k_cache(i), pool.v_cache(i)) for i in range(len(config.layers))]
        logger.info("fa: FlashAttention %s by %s", generation.version, generation.module)

    def prepare_metadata(self, batch: Batch) -> None:
        """Note the batch's tensors, and how much of the page table it needs.

        The width bounds the key length, from which the libraries decide how to split.
        """
        assert batch.host is not None, "a batch comes with the scheduler's arrays"
        num_pages = -(-int(batch.host.seq_lens.max()) // self._page_size)
        batch.attn_metadata = self._metadata(batch, num_pages)

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attend over one layer's part of the pool."""
        metadata: StepMetadata = batch.attn_metadata
        metadata.gather(layer_id)
        k_cache, v_cache = self._caches[layer_id]
        return self._adapter.attend(q, k_cache, v_cache, metadata, self._layers[layer_id])

    def init_graph(self, max_batch_size: int) -> None:
        """Nothing to get ready: graphs read the batch's own tensors."""

    def prepare_for_capture(self, batch: Batch) -> None:
        """Note the fixed tensors; the width is the widest that any replay can need."""
        batch.attn_metadata = self._metadata(batch, self._max_pages)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Nothing to bring up to date: the graph gathers its page-table rows itself."""

    def _metadata(self, batch: Batch, num_pages: int) -> StepMetadata:
        return StepMetadata(batch, self._page_table, num_pages, self._page_size)


def pick_generation(config: AttentionConfig, sm: int | None, version: str) -> Generation:
    """Choose a generation that serves this GPU, model and page size.

    Args:
        config: Of the backend.
        sm: Compute capability of its device.
        version: The setting.

    Raises:
        PluginError: None is installed that serves the GPU and the model.
        SettingsError: The page size is not allowed.
    """
    page_size = config.context.page_size
    context = ProbeContext(
        device=config.device.type if sm is None else "cuda",
        sm=sm,
        dtype=str(config.dtype).removeprefix("torch."),
        head_dim=config.head_dim,
        page_size=page_size,
    )
    choice = choose(context, version)
    generation = choice.generation
    if generation is None:
        raise PluginError(f"--attn fa: {choice.reason}")
    if page_size % generation.page_multiple:
        raise SettingsError(
            f"--page-size {page_size}: FlashAttention {generation.version} allows multiples of "
            f"{generation.page_multiple}"
        )
    return generation
