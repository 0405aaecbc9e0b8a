"""Running a conformance suite inside a test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest


class Outcomes:
    """A plugin that remembers how the tests of a run ended."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.failures: list[str] = []
        self.failed_tests: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_passed += report.when == "call" and report.passed
        if report.failed:
            self.failures.append(report.longreprtext)
            self.failed_tests.append(report.nodeid)


def run_suite(folder: Path, backend: str, *args: str) -> list[str]:
    """Run the suite of one backend, in this process, until it fails.

    Args:
        folder: An empty one, so that no settings of this repository apply.
        backend: As for ``--backend``.
        args: More arguments.

    Returns:
        What the failure says; nothing if there is none.
    """
    return _run(folder, "--backend", backend, "-x", *args).failures


def run_suites(folder: Path, backends: Iterable[str], *args: str) -> dict[str, list[str]]:
    """Run the suite of several backends of one kind to its end, which is faster than one by one.

    Returns:
        What the failures of each backend say.
    """
    backends = list(backends)
    outcomes = _run(folder, *(part for each in backends for part in ("--backend", each)), *args)
    found: dict[str, list[str]] = {backend: [] for backend in backends}
    for test, text in zip(outcomes.failed_tests, outcomes.failures, strict=True):
        for backend, failures in found.items():
            name = backend.partition(":")[2]
            if re.search(rf"[-\[]{re.escape(name)}[-\]]", test):
                failures.append(text)
    return found


def path_of(broken: type) -> str:
    """Return ``module:attribute`` of a class."""
    return f"{broken.__module__}:{broken.__name__}"


def _run(folder: Path, *args: str) -> Outcomes:
    (folder / "pytest.ini").write_text("[pytest]\n")
    outcomes = Outcomes()
    status = pytest.main(
        [
            *("-c", str(folder / "pytest.ini"), "--rootdir", str(folder)),
            *("-p", "minisgl.testing.plugin", "--pyargs", "minisgl.testing"),
            *("-q", "-s", "-p", "no:cacheprovider", *args),
        ],
        plugins=[outcomes],
    )
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), "the run itself failed"
    assert outcomes.num_passed or outcomes.failures, "nothing was tested"
    return outcomes
