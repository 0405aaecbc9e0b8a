"""A real server in processes of its own, on a tiny model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx
import psutil

START_TIMEOUT_S = 240.0
_READY = re.compile(r"ready: serving .* at (\S+) \(")


class ServerProcess:
    """``minisgl serve`` as a user runs it; leaves nothing behind when the block ends."""

    def __init__(
        self,
        model: Path | str,
        folder: Path,
        *flags: str,
        prefix: Sequence[str] = (),
        **env: str,
    ) -> None:
        """Start it; ``prefix`` is a command that becomes what follows it, such as ``nsenter``."""
        self._log_path = folder / "server.log"
        self._log: IO[bytes] = self._log_path.open("wb")
        # Not in `folder`: where a path is too long for a socket, another place is taken.
        self.sockets = Path(tempfile.mkdtemp(prefix="minisgl_test_", dir="/tmp"))
        port = [] if any(flag.startswith(("--port", "--uds")) for flag in flags) else ["--port=0"]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "minisgl", "serve", str(model), *port, *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.sockets)} | env,
        )
        self._known: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def url(self) -> str:
        found = _READY.search(self.log)
        assert found is not None, self.log
        return found[1]

    def wait_until_ready(self) -> ServerProcess:
        self.wait_for(lambda: _READY.search(self.log) is not None)
        self.descendants()
        return self

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended early\n{self.log}"
            assert time.monotonic() < deadline, f"timed out\n{self.log}"
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        """Every process that the server has ever been seen to have."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._known.setdefault(child.pid, child)
        return list(self._known.values())

    def workers(self) -> list[psutil.Process]:
        """Its worker processes in the order of their start: detokenizer, tokenizers, ranks."""
        found = [
            child
            for child in psutil.Process(self.process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        ]
        return sorted(found, key=lambda child: (child.create_time(), child.pid))

    def client(self, **options: float) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=options.get("timeout", 120.0))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        self.descendants()
        self.process.send_signal(number)
        return self.wait()

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    def leftovers(self, patience_s: float = 30.0) -> list[str]:
        """Processes and socket files that are still there some seconds after the end."""
        deadline = time.monotonic() + patience_s
        while True:
            left = [f"process {each.pid}" for each in self._known.values() if is_running(each)]
            left += [str(path) for path in self.sockets.glob("minisgl-*")]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.descendants()
        self.process.kill()
        self.process.wait()
        for each in self._known.values():
            if is_running(each):
                each.kill()
        self._log.close()
        with suppress(OSError):  # what was left is for `leftovers` to find
            self.sockets.rmdir()


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def events(body: str) -> list[str]:
    """The data of server-sent events."""
    return [
        "\n".join(line.removeprefix("data: ") for line in block.split("\n"))
        for block in body.strip("\n").split("\n\n")
        if block.startswith("data: ")
    ]


def joined(texts: Sequence[str | None]) -> str:
    return "".join(text or "" for text in texts)
