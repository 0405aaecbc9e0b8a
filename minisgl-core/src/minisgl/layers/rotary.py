"""Rotary position embedding: the table of cosines and sines, and its rows for one step.

Frequencies come from transformers' own initialisers, so every kind that these know for the
supported architectures means the same here. The table has one row per position, fixed at start
(chunked prefill and prefix caching need keys that do not depend on the rest of their sequence):

* ``default``, ``linear``, ``llama3``, ``yarn``: exact at every position.
* ``dynamic``, ``longrope``: Hugging Face chooses the frequencies by the length of the sequence so
  far. Row ``p`` is what it uses for a sequence of ``p + 1`` tokens. That is exact for sequences
  within the original length and for tokens decoded past it; only a *prompt* longer than the
  original length differs, because Hugging Face then rotates all of it by the frequencies of its
  full length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl.core import get_global_ctx
from minisgl.layers.base import BaseOP, LoadTarget
from minisgl.ops.contract import KernelTable

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

# Rows of a table that are computed at a time, so that the float32 temporaries stay small.
_ROWS_PER_BLOCK = 8192


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which rotation a model uses.

    Attributes:
        rope_type: One of `ROPE_TYPES`.
        theta: Base of the frequencies.
        head_dim: Dimensions of a head; all of them are rotated.
        max_positions: ``max_position_embeddings`` of the checkpoint.
        scaling: The checkpoint's rope fields other than type and theta, in Hugging Face spelling.
    """

    rope_type: str
    theta: float
    head_dim: int
    max_positions: int
    scaling: Mapping[str, Any] = field(default_factory=dict)  # numbers, and lists of longrope

    @property
    def original_length(self) -> int:
        """Tokens up to which the frequencies do not depend on the length of the sequence."""
        if self.rope_type == "longrope":
            return int(self.scaling.get("original_max_position_embeddings", self.max_positions))
        return self.max_positions


@dataclass(frozen=True, slots=True)
class RopeStep:
    """What all layers of one step share.

    Attributes:
        positions: ``[num_tokens]`` int32.
        cos_sin_cache: ``[num_positions, head_dim]`` float32.
        rows: The looked-up rows, where the kernel table shares them.
    """

    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    rows: tuple[torch.Tensor, torch.Tensor] | None


class RotaryEmbedding(BaseOP):
    """Holds the table; looks its rows up once per step."""

    def __init__(
        self,
        config: RopeConfig,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelTable,
    ) -> None:
        """Compute the table for positions below ``num_positions``."""
        self.cos_sin_cache = build_cos_sin_cache(config, num_positions).to(device)
        self._dtype = dtype
        self._rope_rows = kernels.rope_rows

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the frequencies that old checkpoints hold, and nobody reads."""
        yield "inv_freq", LoadTarget(None, is_optional=True)

    def forward(self) -> RopeStep:
        """Prepare the rotation of the active batch's tokens."""
        positions = get_global_ctx().batch.positions
        assert positions is not None, "the engine sets positions before the model runs"
        rows = None
        if self._rope_rows is not None:
            rows = self._rope_rows(positions, self.cos_sin_cache, self._dtype)
        return RopeStep(positions, self.cos_sin_cache, rows)


def build_cos_sin_cache(config: RopeConfig, num_positions: int) -> torch.Tensor:
    """Compute a table.

    Args:
        config: The rotation.
        num_positions: Rows; may be more or fewer than the checkpoint's own length.

    Returns:
        ``[num_positions, head_dim]`` float32 on the host; the first half of a row are cosines, the
        second half sines, both times the attention factor.
    """
    cache = torch.empty(num_positions, config.head_dim, dtype=torch.float32)
    for start in range(0, num_positions, _ROWS_PER_BLOCK):
        positions = torch.arange(start, min(start + _ROWS_PER_BLOCK, num_positions))
        inv_freq, factor = _frequencies(config, positions)
        angles = positions[:, None].float() * inv_freq  # [rows, head_dim / 2]
        block = cache[start : start + len(positions)]
        torch.mul(angles.cos(), factor, out=block[:, : config.head_dim // 2])
        torch.mul(angles.sin(), factor, out=block[:, config.head_dim // 2 :])
    return cache


def _frequencies(config: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return ``[rows or 1, head_dim / 2]`` inverse frequencies and the attention factor."""
    if config.rope_type == "default":
        # transformers 5 has no initialiser for this one.
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return (1.0 / (config.theta**exponents))[None], 1.0
    hf_config = _HfConfig(config)
    initialise = ROPE_INIT_FUNCTIONS[config.rope_type]
    short, factor = initialise(hf_config, torch.device("cpu"))
    original = config.original_length
    is_past = positions >= original
    if config.rope_type not in ("dynamic", "longrope") or not bool(is_past.any()):
        return short[None], factor
    if config.rope_type == "longrope":
        long, factor = initialise(hf_config, torch.device("cpu"), seq_len=original + 1)
        return torch.where(is_past[:, None], long, short), factor
    # A tensor of lengths broadcasts through the initialiser: a row of frequencies per length.
    lengths = (positions + 1)[:, None]
    grown, factor = initialise(hf_config, torch.device("cpu"), seq_len=lengths)
    return torch.where(is_past[:, None], grown, short), factor


class _HfConfig:
    """What the initialisers of transformers 4 and 5 read of a model's configuration.

    It stands in for their own classes, whose import costs seconds.
    """

    def __init__(self, config: RopeConfig) -> None:
        scaling = {"rope_type": config.rope_type, **config.scaling}
        self.hidden_size = self.head_dim = config.head_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = config.max_positions
        self.rope_theta = config.theta
        self.rope_scaling = scaling
        self.rope_parameters = scaling | {"rope_theta": config.theta}
        if config.rope_type == "longrope":
            self.original_max_position_embeddings = config.original_length

    def standardize_rope_params(self) -> None:
        """Need nothing: the fields are in their final form."""
