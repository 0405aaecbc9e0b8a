"""What both planners share: the shapes of the model, the workspace, the call to FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.contract import AttentionConfig, LayerAttention
from minisgl.errors import CapacityError
from minisgl_attn_flashinfer.settings import FlashInferSettings

KV_LAYOUT = "NHD"


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What a plan needs beside the batch.

    Attributes:
        num_qo_heads: Query heads of this rank.
        num_kv_heads: KV heads of this rank.
        head_dim: Of q, k and v.
        page_size: Tokens of a page.
        max_pages_per_req: Most pages of one request.
        dummy_page: The page of padding rows.
        dtype: Of q and KV.
        device: Where everything lives.
        groups: Distinct ways in which layers attend; each is planned by itself.
        settings: The section ``fi``.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages_per_req: int
    dummy_page: int
    dtype: torch.dtype
    device: torch.device
    groups: tuple[LayerAttention, ...]
    settings: FlashInferSettings

    @classmethod
    def of(cls, config: AttentionConfig, settings: FlashInferSettings) -> PlanConfig:
        """Collect it from the backend's configuration."""
        page_size = config.context.page_size
        return cls(
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            max_pages_per_req=-(-config.max_seq_len // page_size),
            dummy_page=config.context.kv_pool.dummy_page,
            dtype=config.dtype,
            device=config.device,
            groups=tuple(dict.fromkeys(config.layers)),
            settings=settings,
        )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The positional sizes of every plan."""
        return self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size

    def options(self, layer: LayerAttention) -> dict[str, Any]:  # Any: passed on as keywords
        """Return the keyword arguments of the plan of one group."""
        return {
            "sm_scale": layer.sm_scale,
            "window_left": layer.window_left,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "non_blocking": True,
        }


class Workspace:
    """The float workspace that all wrappers share, because they run on one stream."""

    def __init__(self, config: PlanConfig) -> None:
        """Note the size; the memory is taken when a wrapper is first made."""
        self._config = config
        self._buffer: torch.Tensor | None = None

    def buffer(self) -> torch.Tensor:
        """Return it; FlashInfer keeps counters in it and wants zeros before its first use."""
        if self._buffer is None:
            num_bytes = self._config.settings.workspace_mib << 20
            device = self._config.device
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._buffer

    def run_plan(self, plan: Callable[..., object], *args: object, **options: object) -> None:
        """Call a wrapper's ``plan`` and say what helps when the workspace is too small.

        Raises:
            CapacityError: The workspace does not hold the partial results of this batch.
        """
        try:
            plan(*args, **options)
        except RuntimeError as error:
            if "workspace" not in str(error) and "Failed to allocate" not in str(error):
                raise
            raise CapacityError(
                f"--fi.workspace-mib {self._config.settings.workspace_mib}: too small for this "
                f"batch, set it higher ({error})"
            ) from error
