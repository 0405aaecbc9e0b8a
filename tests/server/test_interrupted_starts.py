"""Ctrl-C while the server starts: exit code 130 and not a word, whatever the moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.workers.parent import holding_terminal_signals
from tests.server.server_process import ServerProcess

PROGRAM = """
import os, signal, sys

module = sys.argv.pop(1)
# As a terminal has it; whoever runs the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from minisgl.cli.main import main
sys.exit(main())
"""


MODULES = (
    "logging",
    "minisgl.errors",
    "minisgl.cli.output",
    "minisgl.cli.dispatch",
    "pydantic",
    "yaml",
    "minisgl_server.serve",
    "fastapi",
)


@pytest.mark.parametrize("module", MODULES)
def test_an_interrupt_in_the_middle_of_an_import_is_quiet(module: str) -> None:
    run = [sys.executable, "-c", PROGRAM, module, "serve", "/nowhere"]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_an_interrupt_of_the_whole_group_while_workers_start_is_quiet(
    tiny_model: Path, tmp_path: Path, num_workers: int
) -> None:
    flags = ("--num-tokenizer=2",)
    with ServerProcess(tiny_model, tmp_path, *flags, prefix=("setsid",)) as server:
        server.wait_for(lambda: len(server.workers()) >= num_workers)
        server.descendants()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 130
        assert "Traceback" not in server.log
        assert "minisgl: " not in server.log
        assert server.leftovers() == []


def test_a_process_holds_the_signals_from_its_first_instruction() -> None:
    show = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with holding_terminal_signals():
        result = subprocess.run([sys.executable, "-c", show], capture_output=True, check=True)
    assert b"SIGINT" in result.stdout
    assert b"SIGTERM" in result.stdout
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_what_came_meanwhile_is_dropped_when_a_worker_ignores_it() -> None:
    code = (
        "import os, signal; from minisgl.workers.parent import ignore_terminal_signals\n"
        "for each in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), each)\n"
        "ignore_terminal_signals()\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    with holding_terminal_signals():
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    output, _ = process.communicate()
    assert (process.returncode, output.strip()) == (0, b"set()")


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    code = (
        "import signal; from minisgl.cli.quiet_start import begin_quiet_start, end_quiet_start\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "begin_quiet_start(); end_quiet_start()\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, capture_output=True, check=True).stdout.strip() == b"True"
