"""FlashAttention 2, 3 and 4 for minisgl: attention backend ``fa``."""

from __future__ import annotations

__version__ = "0.1.0"
