"""What is written installs, is clean, passes its own tests, conforms, and is served."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.cli.plugin_kinds import PLUGIN_KINDS
from minisgl.testing.tiny_checkpoint import write_tiny_checkpoint
from tests.core.cli.new_plugins import (
    NAMES,
    Outcome,
    imported_modules,
    install,
    run_tests,
    seeing,
    type_complaints,
    write_plugin,
)
from tests.docs.doc_blocks import blocks, commands
from tests.docs.doc_checks import check_arguments
from tests.docs.doc_commands import URL, Shell, clean_environment
from tests.packaging.test_import_rules import is_public
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.timeout(1800)  # fixtures run the suites of all kinds

every_kind = pytest.mark.parametrize("kind", PLUGIN_KINDS)
SUITES = [kind for kind, each in PLUGIN_KINDS.items() if each.has_suite]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a plugin of each kind."""
    folder = tmp_path_factory.mktemp("written")
    return {kind: write_plugin(folder, kind, NAMES[kind]) for kind in PLUGIN_KINDS}


@pytest.fixture(scope="module")
def target(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are installed, all together."""
    return install(list(written.values()), tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def own_tests(
    written: dict[str, Path], target: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Outcome]:
    """How their tests end, but for the conformance suites."""
    tests = [str(folder / "tests") for folder in written.values()]
    root = written["attention"].parent  # so that a test's name begins with its distribution's
    flags = ("--rootdir", str(root), "-k", "not test_it_conforms")
    return run_tests(target, tmp_path_factory.mktemp("run"), *tests, *flags)


@pytest.fixture(scope="module")
def conformance(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """How all conformance suites end, in one run."""
    backends = [f"--backend={kind}:{NAMES[kind]}" for kind in SUITES]
    folder = tmp_path_factory.mktemp("kit")
    return run_tests(target, folder, "--pyargs", "minisgl.testing", *backends)


@every_kind
def test_its_own_tests_pass(written: dict[str, Path], own_tests: list[Outcome], kind: str) -> None:
    package = written[kind].name
    mine = [outcome for outcome in own_tests if package in outcome.name]
    assert mine, "no test of it ran"
    assert [outcome for outcome in mine if outcome.failure or outcome.is_skipped] == []


@pytest.mark.parametrize("kind", SUITES)
def test_it_conforms(conformance: list[Outcome], kind: str) -> None:
    mine = [outcome for outcome in conformance if f"test_{kind}" in outcome.name]
    assert any(not outcome.is_skipped for outcome in mine), "nothing was tested"
    assert [outcome for outcome in mine if outcome.failure] == []


@pytest.mark.parametrize("kind", SUITES)
def test_its_conformance_test_names_itself(written: dict[str, Path], kind: str) -> None:
    text = (written[kind] / "tests/test_conformance.py").read_text()
    assert f'BACKEND = "{kind}:{NAMES[kind]}"' in text


@every_kind
def test_it_imports_public_modules_alone(written: dict[str, Path], kind: str) -> None:
    found = {name for path in written[kind].rglob("*.py") for name in imported_modules(path)}
    core = {name for name in found if name.split(".")[0] == "minisgl"}
    assert core, "it imports the core"
    assert {name for name in core if not is_public(name)} == set()


class ReadmeShell(Shell):
    """Checks the commands of a plugin's README; other tests run its tools and ask its server."""

    def _run_minisgl(self, words: list[str], given: str) -> str:
        if words[0] == "plugins":
            return super()._run_minisgl(words, given)
        check_arguments(words, set())
        return ""

    def _run_pip(self, words: list[str], given: str) -> str:
        if "--group" in words:
            project = tomllib.loads((self.folder / "pyproject.toml").read_text())
            assert words[words.index("--group") + 1] in project["dependency-groups"]
        return super()._run_pip(words, given)

    def _run_curl(self, words: list[str], given: str) -> str:
        assert words[0] == f"{URL}/{NAMES['routes']}"
        return ""

    def _run_ruff(self, words: list[str], given: str) -> str:
        assert words == ["check", "."]
        return ""

    def _run_mypy(self, words: list[str], given: str) -> str:
        assert words == []
        return ""


@pytest.fixture
def seen_in_this_process(target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets this process import what was installed, and forgets it afterwards."""
    before = set(sys.modules)
    clean_environment(monkeypatch)
    monkeypatch.syspath_prepend(str(target))
    yield
    packages = {path.name for path in target.iterdir()}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in packages:
            del sys.modules[name]


@every_kind
@pytest.mark.usefixtures("seen_in_this_process")
def test_the_commands_of_its_readme_are_right(written: dict[str, Path], kind: str) -> None:
    folder = written[kind]
    shell = ReadmeShell(folder, folder, server_url=lambda: URL)
    found = [each for each in blocks(str(folder / "README.md")) if each.language == "bash"]
    assert len(found) >= 3, "how to install, to use and to develop it"
    for block in found:
        for command in commands(block.text):
            shell.run(command)


def test_all_of_them_are_strictly_typed(written: dict[str, Path], tmp_path: Path) -> None:
    assert type_complaints(list(written.values()), tmp_path) == ""


def test_all_of_them_are_listed_as_working(target: Path) -> None:
    command = [sys.executable, "-m", "minisgl", "plugins", "--json", "--device", "cpu"]
    run = subprocess.run(command, env=seeing(target), capture_output=True, text=True, check=True)
    document = json.loads(run.stdout)
    works = {(row["kind"], row["name"]): row["is_available"] for row in document["backends"]}
    hooks = {hook["name"] for hook in document["hooks"]}
    for kind, each in PLUGIN_KINDS.items():
        assert works.get((kind, NAMES[kind])) or (not each.constant and NAMES[kind] in hooks), kind
    assert document["failures"] == []


@pytest.fixture
def site_env(target: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(target)}


def complete(server: ServerProcess) -> str:
    """Ask a server for a few tokens; returns the reason why they end."""
    body = {"model": "m", "prompt": "the quick brown fox", "max_tokens": 6, "ignore_eos": True}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body | {"model": served(client)})
    assert answer.status_code == 200, answer.text
    reason: str = answer.json()["choices"][0]["finish_reason"]
    return reason


def served(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


@pytest.mark.slow
def test_they_are_served_when_picked_by_name(tmp_path: Path, site_env: dict[str, str]) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", has_experts=True)
    picks = [PLUGIN_KINDS[kind].pick.replace("$name", NAMES[kind]).split() for kind in (
        "attention", "cache", "kernels", "moe", "policy")]  # fmt: skip
    flags = [flag for pick in picks for flag in pick]
    source = NAMES["source"]
    flags += [f"--{source}.root={tmp_path}", "--dummy-weight", "--num-pages=64"]
    banned = {f"{NAMES['logits_processor'].replace('-', '_').upper()}_IDS": "65,66"}
    with ServerProcess(f"{source}:tiny", tmp_path, *flags, **site_env, **banned) as server:
        server.wait_until_ready()
        assert complete(server) == "length"
        for kind in ("attention", "kernels", "moe"):
            assert NAMES[kind] in server.log
        with server.client() as client:
            page = client.get(f"/{NAMES['routes']}").json()
    assert {"kind": "cache", "name": NAMES["cache"], "version": "0.1.0"} in page["backends"]


@pytest.mark.slow
def test_a_model_is_served_by_two_ranks_with_a_communicator(
    tmp_path: Path, site_env: dict[str, str]
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", architectures=[NAMES["model"]])
    flags = ("--comm", NAMES["comm"], "--tp", "2", "--dummy-weight", "--num-pages", "64")
    with ServerProcess(folder, tmp_path, *flags, **site_env) as server:
        server.wait_until_ready()
        assert complete(server) == "length"
        assert NAMES["comm"] in server.log
