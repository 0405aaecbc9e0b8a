"""An attention backend for minisgl: one call of PyTorch's attention for a whole batch."""

from __future__ import annotations

__version__ = "0.1.0"
