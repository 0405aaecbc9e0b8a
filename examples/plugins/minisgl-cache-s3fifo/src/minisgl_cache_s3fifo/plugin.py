"""What this distribution registers: prefix cache ``s3fifo``."""

from __future__ import annotations

from minisgl.plugin.spec import PLUGIN_API, BackendSpec
from minisgl_cache_s3fifo.settings import S3FifoSettings

CACHE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_cache_s3fifo.backend:S3FifoCache",
    summary="S3-FIFO: prompts that come once do not flush it",
    settings=S3FifoSettings,
)
