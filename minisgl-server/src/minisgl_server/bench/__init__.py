"""``minisgl bench serve``: load on any server with OpenAI's API."""

from __future__ import annotations
