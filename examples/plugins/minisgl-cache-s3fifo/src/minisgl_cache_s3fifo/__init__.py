"""A prefix cache for minisgl that one-off prompts cannot flush: S3-FIFO."""

from __future__ import annotations

__version__ = "0.1.0"
