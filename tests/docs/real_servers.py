"""The servers that a page of the documentation starts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

READY = re.compile(r"ready: serving .* at (\S+) \(")
START_TIMEOUT_S = 300.0


@dataclass
class Servers:
    """One server at a time, of one process tree per node. It ends when the next one starts.

    Attributes:
        folder: Where they run.
        master: Address and port at which nodes meet.
        started: Command lines of all.
        running: Processes of the one that runs, node 0 first.
        url: Of the one that runs; empty when there is none.
    """

    folder: Path
    master: str = ""
    started: list[str] = field(default_factory=list)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    url: str = ""

    def start(self, words: Sequence[str], env: dict[str, str]) -> None:
        """Start a server, or one more node; when it is whole, let it answer."""
        if value_of(words, "--node-rank", "0") == "0":
            self.stop()
        port = [] if "--port" in words else ["--port", "0"]
        with self._log_path().open("wb") as log:
            self.running.append(
                subprocess.Popen(
                    [*words, *port],
                    cwd=self.folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        self.started.append(" ".join(words))
        if len(self.running) == int(value_of(words, "--nnodes", "1")):
            self.url = self._wait_until_ready(len(self.started) - len(self.running))
            self._complete()

    def address(self) -> str:
        """Return where the nodes of this page meet: a free port of this machine."""
        if not self.master:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                self.master = f"127.0.0.1:{taken.getsockname()[1]}"
        return self.master

    def stop(self) -> None:
        """End the server by the signal that users send; all of it has to end well."""
        running, self.running, self.url = self.running, [], ""
        if running:
            running[0].send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in running]
        assert codes == [0] * len(codes), f"{self.started[-1]}: ended with {codes}"

    def kill(self) -> None:
        """Leave nothing behind."""
        for process in self.running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log_path(self, number: int | None = None) -> Path:
        return self.folder / f"server-{len(self.started) if number is None else number}.log"

    def _wait_until_ready(self, number: int) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := READY.search(self._log_path(number).read_text())):
            log = self._log_path(number).read_text()
            assert all(each.poll() is None for each in self.running), f"ended early\n{log}"
            assert time.monotonic() < deadline, f"timed out\n{log}"
            time.sleep(0.1)
        return found[1]

    def _complete(self) -> None:
        body = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text


def value_of(words: Sequence[str], flag: str, default: str) -> str:
    """Return the word behind a flag."""
    return words[list(words).index(flag) + 1] if flag in words else default
