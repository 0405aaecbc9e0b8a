"""The web page at ``/``."""

from __future__ import annotations
