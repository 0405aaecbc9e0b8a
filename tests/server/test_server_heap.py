"""What the processes of a server have loaded is left out of their garbage collections."""

from __future__ import annotations

import os
from pathlib import Path

from tests.server.server_process import ServerProcess

# Python imports it by itself, in each of the processes.
TELL = """
import gc, os

freeze = gc.freeze

def freeze_and_tell():
    freeze()
    with open(os.environ["FROZEN"], "a") as file:
        print(os.getpid(), gc.get_freeze_count(), file=file)

gc.freeze = freeze_and_tell
"""


def test_every_process_settles_its_heap_before_it_serves(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELL)
    told = tmp_path / "frozen"
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "FROZEN": str(told)}
    with ServerProcess(tiny_model, tmp_path, "--num-tokenizer=1", **env) as server:
        server.wait_until_ready()
        lines = [line.split() for line in told.read_text().splitlines()]
        counts = {int(pid): int(count) for pid, count in lines}
        assert counts.keys() == {server.process.pid, *(w.pid for w in server.workers())}
    assert min(counts.values()) > 10_000
