"""The settings of ``fused``, and what it reads from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from minisgl.config.fields import SettingsSection


class FusedSettings(SettingsSection):
    """How ``fused`` computes (``--fused.…``)."""

    chunk_tokens: int = Field(
        default=8192,
        ge=1,
        le=65536,
        description="Most tokens of a layer that are computed at once, in tokens; more run in "
        "parts. Bounds the memory for intermediate results. Read when the backend is built.",
    )
    launch_overlap: Literal["auto", "never"] = Field(
        default="auto",
        description="Whether a kernel may launch while the one before it ends; auto does so from "
        "compute capability 9.0 on. Read when the backend is built.",
    )
    table: Path | None = Field(
        default=None,
        description="Table of tuned tiles to use in place of the one in the user's cache. "
        "Read when the backend is built.",
    )


def is_interpreted() -> bool:
    """Return whether Triton's kernels run on the CPU, interpreted, by Triton's own variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def cache_folder() -> Path:
    """Return where tables that were made on this machine are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minisgl" / "moe-triton"
