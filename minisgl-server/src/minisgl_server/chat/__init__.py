"""``minisgl chat``: a conversation in the terminal."""

from __future__ import annotations
