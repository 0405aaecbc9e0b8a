"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that is busy with other things is slow, and no test is about that.
settings.register_profile(
    "minisgl", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("minisgl")
