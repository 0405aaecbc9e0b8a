"""The pytest plugin of the conformance suites: ``--backend`` and what follows from it.

It is loaded by naming `minisgl.testing` on the command line, or with ``-p minisgl.testing.plugin``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from minisgl.errors import MinisglError
from minisgl.testing.selection import (
    SUITES,
    BackendSelector,
    TestedBackend,
    suite_kind,
    suite_kinds,
)

pytest.register_assert_rewrite("minisgl.testing.cache_model")

_SELECTED = pytest.StashKey[list[TestedBackend]]()
_SELECTOR = pytest.StashKey[BackendSelector]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags."""
    group = parser.getgroup("minisgl", "minisgl conformance suites")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="KIND[:NAME]",
        help="backend to test, such as cache:radix or cache:package.module:Factory; KIND alone "
        f"tests all that are installed; may be repeated; kinds: {', '.join(suite_kinds())}",
    )
    group.addoption(
        "--backend-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where tensors live (default: cuda if there is one)",
    )
    group.addoption(
        "--source-model",
        metavar="MODEL",
        help="what to ask a model source for, where it cannot make a sample of its own",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Resolve the backends, so that a wrong name ends the run with one line."""
    config.addinivalue_line(
        "markers", "recency: eviction order; deselect it for a cache that is not LRU on purpose"
    )
    if find_spec("hypothesis") is None:
        raise pytest.UsageError("the conformance suites need hypothesis: minisgl-core[testing]")
    # A backend that is not installed yet may be a file where pytest is run. At the end, so that
    # nothing there hides what is installed.
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        sys.path.append(here)
        config.add_cleanup(lambda: sys.path.remove(here))
    try:
        selector = BackendSelector(config.getoption("--backend-device"))
        selected = selector.select(config.getoption("--backend"))
    except MinisglError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_SELECTED] = selected
    config.stash[_SELECTOR] = selector


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is tested, and what was asked for and does not work here."""
    selector = config.stash[_SELECTOR]
    selected = config.stash[_SELECTED]
    chosen = ", ".join(str(backend) for backend in selected) or "none"
    lines = [f"minisgl backends on {selector.machine.device}: {chosen}"]
    return lines + [f"not tested: {refusal}" for refusal in selector.refused]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the suites of kinds that were not asked for, without importing them."""
    if collection_path.parent != SUITES or not collection_path.stem.startswith("test_"):
        return None
    kind = suite_kind(collection_path)
    return True if kind not in {chosen.kind for chosen in config.stash[_SELECTED]} else None


def pytest_collection(session: pytest.Session) -> None:
    """Refuse a run of the suites that names no backend: it would pass by testing nothing."""
    if not session.config.stash[_SELECTED]:
        raise pytest.UsageError(
            f"--backend is missing: give KIND:NAME; kinds: {', '.join(suite_kinds())}"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a suite once per chosen backend of its kind."""
    path = Path(metafunc.module.__file__ or "")
    if path.parent != SUITES or "backend" not in metafunc.fixturenames:
        return
    kind = suite_kind(path)
    chosen = [backend for backend in metafunc.config.stash[_SELECTED] if backend.kind == kind]
    metafunc.parametrize("backend", chosen, ids=[backend.name for backend in chosen])
