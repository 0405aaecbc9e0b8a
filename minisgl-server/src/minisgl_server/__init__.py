"""The OpenAI-compatible HTTP server of minisgl, and the processes around it."""

from __future__ import annotations

__version__ = "0.1.0"
