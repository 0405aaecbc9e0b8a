"""Fused mixture of experts in Triton for minisgl: the backend ``fused``."""

from __future__ import annotations

__version__ = "0.1.0"
