"""The settings of ``s3fifo``."""

from __future__ import annotations

from pydantic import Field

from minisgl.config.fields import SettingsSection


class S3FifoSettings(SettingsSection):
    """What ``s3fifo`` gives up first (``--s3fifo.…``)."""

    small_share: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Share of the cache's pages beyond which those on probation go first. Read by "
        "evict.",
    )
