"""The command line of the conformance suites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run_pytest(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    return subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)


def run_suites(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run_pytest(folder, "--pyargs", "minisgl.testing", *args)


def test_naming_the_package_is_enough(tmp_path: Path) -> None:
    run = run_suites(tmp_path, "--backend", "cache:naive", "-k", "page4 or page16")
    assert run.returncode == 0, run.stdout
    assert "minisgl backends on" in run.stdout
    assert "cache:naive" in run.stdout


def test_suites_of_other_kinds_are_not_collected(tmp_path: Path) -> None:
    run = run_suites(tmp_path, "--backend", "cache:naive", "--collect-only", "-q")
    assert "test_cache.py" in run.stdout
    assert "test_attention.py" not in run.stdout


def test_several_backends_are_tested_in_one_run(tmp_path: Path) -> None:
    args = ("--backend", "cache:naive", "--backend", "cache:radix", "--collect-only", "-q")
    run = run_suites(tmp_path, *args)
    assert "[page1-naive]" in run.stdout
    assert "[page1-radix]" in run.stdout


def test_a_kind_alone_means_everything_installed(tmp_path: Path) -> None:
    run = run_suites(tmp_path, "--backend", "cache", "--collect-only", "-q")
    for name in ("naive", "radix"):
        assert f"[page4-{name}]" in run.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--backend is missing: give KIND:NAME; kinds: attention, cache"),
        (("--backend", "cachet"), "--backend cachet: must be KIND:NAME such as cache:radix"),
        (("--backend", "cache:"), "--backend cache:: must be KIND:NAME such as cache:radix"),
        (("--backend", "cache:zz"), "no installed plugin offers 'zz'; installed: naive, radix"),
        (("--backend", "cache:no.such:Cache"), "No module named 'no'"),
    ],
)
def test_a_wrong_backend_ends_the_run_with_one_line(
    tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    run = run_suites(tmp_path, *args)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_the_flag_does_not_exist_in_other_runs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend', default='ours')\n"
    )
    (tmp_path / "test_theirs.py").write_text(
        "def test_it(pytestconfig):\n    assert pytestconfig.getoption('--backend') == 'ours'\n"
    )
    assert run_pytest(tmp_path, "-q").returncode == 0


def test_a_backend_that_is_not_installed_is_tested_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from minisgl.kvcache.naive import NaiveCache\n\n\nclass Mine(NaiveCache):\n    pass\n"
    )
    args = ("--backend", "cache:mine:Mine", "-k", "page4")
    # By the command itself: `python -m` would put this folder in front of what can be imported.
    pytest_command = [str(Path(sys.executable).with_name("pytest")), "--pyargs", "minisgl.testing"]
    run = subprocess.run([*pytest_command, *args], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "cache:mine:Mine" in run.stdout
