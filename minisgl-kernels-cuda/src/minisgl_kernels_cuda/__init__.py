"""CUDA kernels for minisgl: kernel set ``cuda``."""

from __future__ import annotations

__version__ = "0.1.0"
