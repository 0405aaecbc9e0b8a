from __future__ import annotations

from tests.core.plugin.installed import boot, site

__all__ = ["boot", "site"]
