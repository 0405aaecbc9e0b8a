"""A server one of whose ranks is killed while it answers, on whatever devices."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.server.server_process import ServerProcess, events, is_running
from tests.tp.spare_clock import GONE_S, PATIENCE_S, SpareClock


def check_a_killed_rank_ends_the_server(
    model: Path, folder: Path, flags: tuple[str, ...], paced: Mapping[str, str], rank: int
) -> None:
    """Kill it; everything ends in time, with an error for every request.

    The steps have to be `paced`: the third stream waits for one of the others, and has no headers
    before the server says that it is still there.
    """
    flags = (*flags, "--num-tokenizer=0", "--max-running-requests=2")
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": 1500, "stream": True}
    with ServerProcess(model, folder, *flags, **paced) as server:
        server.wait_until_ready()
        workers = server.workers()
        with ExitStack() as stack:
            http = stack.enter_context(server.client())
            streams = [
                stack.enter_context(http.stream("POST", "/v1/completions", json=body)).iter_lines()
                for _ in range(3)
            ]
            next(streams[0])
            clock = SpareClock()
            workers[1 + rank].send_signal(signal.SIGKILL)
            answers = ["\n".join(lines) for lines in streams]
        assert server.wait(PATIENCE_S) == 1
        assert clock.stop() < GONE_S
        for answer in answers:
            last = json.loads(events(answer)[-1])
            assert f"scheduler {rank} was killed by signal 9" in last["error"]["message"]
        assert not any(map(is_running, workers))
        assert server.leftovers() == []
