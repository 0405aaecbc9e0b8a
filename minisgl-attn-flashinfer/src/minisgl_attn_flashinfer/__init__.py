"""FlashInfer for minisgl: attention backend ``fi`` and kernel set ``fi``."""

from __future__ import annotations

__version__ = "0.1.0"
