"""Running a conformance suite inside a test."""

from __future__ import annotations

from pathlib import Path

import pytest


class Outcomes:
    """A plugin that remembers how the tests of a run ended."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_passed += report.when == "call" and report.passed
        if report.failed:
            self.failures.append(report.longreprtext)


def run_suite(folder: Path, backend: str, *args: str) -> list[str]:
    """Run the suite of one backend, in this process, until it fails.

    Args:
        folder: An empty one, so that no settings of this repository apply.
        backend: As for ``--backend``.
        args: More arguments.

    Returns:
        What the failure says; nothing if there is none.
    """
    (folder / "pytest.ini").write_text("[pytest]\n")
    outcomes = Outcomes()
    status = pytest.main(
        [
            *("-c", str(folder / "pytest.ini"), "--rootdir", str(folder)),
            *("-p", "minisgl.testing.plugin", "--pyargs", "minisgl.testing"),
            *("--backend", backend, "-x", "-q", "-s", "-p", "no:cacheprovider", *args),
        ],
        plugins=[outcomes],
    )
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), "the run itself failed"
    assert outcomes.num_passed or outcomes.failures, "nothing was tested"
    return outcomes.failures


def path_of(broken: type) -> str:
    """Return ``module:attribute`` of a class."""
    return f"{broken.__module__}:{broken.__name__}"
