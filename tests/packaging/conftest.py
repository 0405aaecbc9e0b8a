from __future__ import annotations

from tests.packaging.wheel_builds import wheel_of

__all__ = ["wheel_of"]
