"""The settings of ``fa``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from minisgl.config.fields import SettingsSection


class FlashAttentionSettings(SettingsSection):
    """How ``fa`` attends (``--fa.…``)."""

    version: Literal["auto", "2", "3", "4"] = Field(
        default="auto",
        description="Generation of FlashAttention; auto takes the best installed one for the GPU. "
        "Read when the backend is made.",
    )
    num_splits: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Parts into which long sequences are split over idle SMs; 0 lets the library "
        "choose, 1 makes results independent of who shares the batch. FlashAttention 4 does not "
        "split on compute capability 9.0. Read by each generation's adapter.",
    )
