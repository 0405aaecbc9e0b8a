"""Which backends an engine is assembled from, decided before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.config.load import Settings
from minisgl.device import compute_capability
from minisgl.models.config import ModelConfig
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.selection import AttentionSelection, SelectedBackend, Selection
from minisgl.plugin.spec import ProbeContext

# In tokens. Larger pages make shorter page tables and fewer allocations; 16 still lets requests
# share prefixes that differ late.
_PREFERRED_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineBackends:
    """The picked backends of each kind that an engine needs.

    Attributes:
        model: The architecture.
        kernels: The chain of kernel sets.
        attention: For both phases, and the page size.
        moe: For sparse models, else ``None``.
        comm: The collectives.
    """

    model: Selection
    kernels: Selection
    attention: AttentionSelection
    moe: Selection | None
    comm: Selection

    @classmethod
    def resolve(
        cls,
        manager: PluginManager,
        settings: Settings,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EngineBackends:
        """Pick every backend.

        Raises:
            PluginError: A choice cannot be met; the message starts with its flag.
        """
        context = probe_context(settings, config, device, dtype)
        choice = settings.backends
        return cls(
            model=manager.resolve("model", config.architecture, context),
            kernels=manager.resolve_chain("kernels", choice.kernels, context),
            attention=manager.resolve_attention(
                choice.attn, context, preferred_page_size=_PREFERRED_PAGE_SIZE
            ),
            moe=manager.resolve("moe", choice.moe, context) if config.moe is not None else None,
            comm=manager.resolve("comm", choice.comm, context),
        )

    def names(self) -> dict[str, str]:
        """Return what serves each kind, in the spelling of its flag."""
        chosen = {
            "attention": self.attention.names,
            "kernels": ",".join(backend.name for backend in self.kernels.chosen),
            "comm": self.comm.one.name,
            "model": self.model.one.name,
        }
        return chosen if self.moe is None else chosen | {"moe": self.moe.one.name}

    def selected(self) -> tuple[SelectedBackend, ...]:
        """Return all backends; one that serves several phases stands there for each."""
        attn = self.attention
        rest = [s for s in (self.kernels, self.moe, self.comm, self.model) if s is not None]
        picked = (backend for selection in rest for backend in selection.chosen)
        return (attn.prefill, attn.decode, attn.large_decode, *picked)

    def describe(self) -> list[str]:
        """Say for each kind what was picked and why, one line each."""
        chosen = (self.attention, self.kernels, self.moe, self.comm, self.model)
        return [selection.describe() for selection in chosen if selection is not None]


def probe_context(
    settings: Settings, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> ProbeContext:
    """Describe machine and model to the probes."""
    tp = settings.engine.tp
    return ProbeContext(
        device=device.type,
        sm=compute_capability(device),
        dtype=str(dtype).removeprefix("torch."),
        head_dim=config.head_dim,
        num_qo_heads=config.num_qo_heads // tp,
        num_kv_heads=max(1, config.num_kv_heads // tp),
        page_size=settings.engine.page_size,
        tp_size=tp,
        has_sliding_window=any(window is not None for window in config.windows),
        needs_graph_capture=bool(settings.engine.cuda_graph_max_bs),
    )
