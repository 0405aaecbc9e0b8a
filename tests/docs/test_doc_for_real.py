"""Pages with long commands, followed from top to bottom as they stand: install, test, serve."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.doc_blocks import DOCUMENTS, page_commands
from tests.docs.doc_commands import clean_environment, is_dear
from tests.docs.real_checkout import copy_checkout, make_variables
from tests.docs.real_environment import build_wheels, link_others, make_environment, variables
from tests.docs.real_shell import RealShell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OF_A_CHECKOUT = re.compile(r"make |\.venv/|\./minisgl-|-r requirements|examples/|tests/|benchmarks")
INSTALLS = re.compile(r"pip install .*minisgl-(core|server)\b")
PAGES = [each for each in DOCUMENTS if any(map(is_dear, page_commands(each)))]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Builds what pip finds in place of an index, when it is first asked for."""
    return cache(lambda: build_wheels(tmp_path_factory.mktemp("wheels")))


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_others(tmp_path_factory.mktemp("linked") / "site-packages")


@pytest.fixture
def follow(
    tmp_path: Path,
    wheels: Callable[[], Path],
    others: Path,
    server_url: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], RealShell]]:
    """Follows a page, in a folder and an environment as its reader has them."""
    clean_environment(monkeypatch)
    folder = tmp_path / "work"
    folder.mkdir()
    shells: list[RealShell] = []

    def follow(document: str) -> RealShell:
        text = "\n".join(map(str, page_commands(document)))
        if OF_A_CHECKOUT.search(text):
            copy_checkout(folder)
        is_new = INSTALLS.search(text) is not None
        programs = make_environment(tmp_path / "env", bare=others if is_new else None)
        env = variables(programs, wheels() if "pip install" in text else None)
        shell = RealShell(folder, env, cache(lambda: make_variables(tmp_path)), server_url)
        shells.append(shell)
        for command in page_commands(document):
            shell.run(command)
        shell.servers.stop()
        return shell

    yield follow
    for shell in shells:
        shell.servers.kill()


@pytest.mark.parametrize("document", PAGES)
def test_a_page_can_be_followed_as_it_is_written(
    document: str, follow: Callable[[str], RealShell]
) -> None:
    shell = follow(document)
    assert shell.num_run == len(page_commands(document))
