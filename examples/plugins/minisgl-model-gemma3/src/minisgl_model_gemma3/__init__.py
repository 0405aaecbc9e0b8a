"""The text models of Gemma 3 for minisgl."""

from __future__ import annotations

__version__ = "0.1.0"
