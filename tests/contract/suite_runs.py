"""Running a conformance suite inside a test."""

from __future__ import annotations

import pytest


def run_suite(pytester: pytest.Pytester, backend: str, *args: str) -> list[str]:
    """Run the suite of one backend until it fails.

    Args:
        pytester: Pytest's own runner.
        backend: As for ``--backend``.
        args: More arguments.

    Returns:
        What the failures say.
    """
    run = pytester.inline_run(
        *("--pyargs", "minisgl.testing", f"--backend={backend}", "-p", "minisgl.testing.plugin"),
        *("-x", "-q", "-p", "no:cacheprovider", *args),
    )
    passed, _, failed = run.listoutcomes()
    assert passed or failed, "nothing was tested"
    return [report.longreprtext for report in failed]


def path_of(broken: type) -> str:
    """Return ``module:attribute`` of a class."""
    return f"{broken.__module__}:{broken.__name__}"
