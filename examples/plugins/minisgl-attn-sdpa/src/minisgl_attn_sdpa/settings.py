"""The settings of ``sdpa``."""

from __future__ import annotations

from pydantic import Field

from minisgl.config.fields import SettingsSection


class SdpaSettings(SettingsSection):
    """How ``sdpa`` attends (``--sdpa.…``)."""

    max_group_cells: int = Field(
        default=1 << 24,
        ge=1,
        description="Cells of the mask of one call, requests x queries x keys; a prefill whose "
        "padded batch has more is cut into groups of requests. Read by prepare_metadata.",
    )
