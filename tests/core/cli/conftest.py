from __future__ import annotations

from tests.core.plugin.installed import boot, run_python, site

__all__ = ["boot", "run_python", "site"]
