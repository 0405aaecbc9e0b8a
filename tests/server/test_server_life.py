"""Every way in which a server can start, end and die; nothing may be left afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from minisgl.message.folder import SocketFolder
from tests.server.idle import gauge
from tests.server.server_process import ServerProcess, events

LONG = {"prompt": "a", "ignore_eos": True, "max_tokens": 1900, "stream": True}


@contextmanager
def open_stream(server: ServerProcess, **body: object) -> Iterator[httpx.Response]:
    """A stream of which the first event has come."""
    with (
        server.client() as http,
        http.stream("POST", "/v1/completions", json=LONG | body) as response,
    ):
        assert response.status_code == 200
        yield response


@pytest.mark.parametrize("number", [0, 1, 2], ids=["detokenizer", "tokenizer", "scheduler"])
def test_a_dead_worker_ends_everything_with_an_error(
    tiny_model: Path, tmp_path: Path, paced: dict[str, str], number: int
) -> None:
    with ServerProcess(tiny_model, tmp_path, "--num-tokenizer=1", **paced) as server:
        server.wait_until_ready()
        with server.client() as http, open_stream(server) as response:
            lines = response.iter_lines()
            next(lines)
            server.workers()[number].send_signal(signal.SIGKILL)
            rest = "\n".join(lines)
            with suppress(httpx.TransportError):  # the server has ended, on a busy machine
                health = http.get("/health")
                assert health.json()["error"]["code"] == "engine_unavailable"
        last = json.loads(events(rest)[-1])
        assert "was killed by signal 9" in last["error"]["message"]
        assert "[DONE]" not in rest
        assert server.wait() == 1
        assert server.leftovers() == []


def test_killing_the_server_leaves_nothing(
    tiny_model: Path, tmp_path: Path, paced: dict[str, str]
) -> None:
    with ServerProcess(tiny_model, tmp_path, **paced) as server:
        server.wait_until_ready()
        with open_stream(server):
            server.end(signal.SIGKILL)
        assert server.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_finish(
    tiny_model: Path, tmp_path: Path, paced: dict[str, str], number: signal.Signals
) -> None:
    with ServerProcess(tiny_model, tmp_path, "--drain-timeout-s=600", **paced) as server:
        server.wait_until_ready()
        with open_stream(server, max_tokens=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.descendants()
            server.process.send_signal(number)
            assert events("\n".join(lines))[-1] == "[DONE]"
        assert server.wait() == 0
        assert server.leftovers() == []


def test_draining_has_a_limit(tiny_model: Path, tmp_path: Path, paced: dict[str, str]) -> None:
    """What is cut off is told so, in a stream and outside of one."""
    with ServerProcess(tiny_model, tmp_path, "--drain-timeout-s=0", **paced) as server:
        server.wait_until_ready()
        url, body = f"{server.url}/v1/completions", LONG | {"stream": False}
        with (
            ThreadPoolExecutor(1) as pool,
            open_stream(server) as response,
            server.client() as http,
        ):
            lines = response.iter_lines()
            plain = pool.submit(httpx.post, url, json=body, timeout=120)
            server.wait_for(lambda: gauge(http, "num_requests_running") == 2)
            assert server.end() == 0
            event = events("\n".join(lines))[-1]
            errors = [json.loads(event)["error"], plain.result().json()["error"]]
        assert plain.result().status_code == 503
        assert [error["code"] for error in errors] == ["aborted", "aborted"]
        assert "--drain-timeout-s" in errors[0]["message"]
        assert "Traceback" not in server.log
        assert server.leftovers() == []


def test_a_second_interrupt_ends_at_once(
    tiny_model: Path, tmp_path: Path, paced: dict[str, str]
) -> None:
    with ServerProcess(tiny_model, tmp_path, "--drain-timeout-s=600", **paced) as server:
        server.wait_until_ready()
        with open_stream(server):
            server.descendants()
            server.process.send_signal(signal.SIGINT)
            server.wait_for(lambda: "no new requests" in server.log)
            server.process.send_signal(signal.SIGINT)
            assert server.wait() == 130
        assert server.leftovers() == []


def test_an_interrupted_start_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny_model, tmp_path) as server:
        server.wait_for(lambda: len(server.workers()) == 2)
        assert server.end(signal.SIGINT) == 130
        assert server.leftovers() == []


def test_killing_the_server_while_it_starts_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    with ServerProcess(tiny_model, tmp_path) as server:
        server.wait_for(lambda: "scheduler 0: cache" in server.log)
        server.end(signal.SIGKILL)
        assert server.leftovers() == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--attn=nowhere"], "--attn nowhere: "),
        (["--startup-timeout-s=0.1"], "--startup-timeout-s 0.1: "),
        (["--chat-template=/nowhere"], "--chat-template /nowhere: cannot be read"),
        (["--ssl-certfile=/nowhere"], "--ssl-certfile /nowhere: cannot be used"),
        (["--host=203.0.113.7"], "--host 203.0.113.7 "),
    ],
    ids=["backend", "timeout", "template", "tls", "host"],
)
def test_a_failed_start_says_why_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    with ServerProcess(tiny_model, tmp_path, *flags) as server:
        assert server.wait() in (1, 2)
        assert f"minisgl: {message}" in server.log
        assert "Traceback" not in server.log
        assert server.leftovers() == []


def test_a_corrupt_tokenizer_is_one_clear_line(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "tokenizer.json").write_text("{")
    with ServerProcess(broken, tmp_path) as server:
        assert server.wait() == 1
        assert "minisgl: " in server.log
        assert "tokenizer" in server.log.splitlines()[-1]
        assert server.leftovers() == []


def test_a_taken_port_is_seen_before_anything_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess(tiny_model, tmp_path, f"--port={port}") as server:
            assert server.wait() == 2
            assert f"--port {port}: is in use" in server.log
            assert "scheduler" not in server.log


def test_what_a_killed_server_left_is_removed(
    tiny_model: Path, tmp_path: Path, short_tmp: Path
) -> None:
    stale = short_tmp / f"minisgl-{os.getuid()}-stale123"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "scheduler").touch()
    with ServerProcess(tiny_model, tmp_path, TMPDIR=str(short_tmp)) as server:
        server.wait_until_ready()
        assert not stale.exists()
        assert server.end() == 0


def test_a_long_tmpdir_does_no_harm(tiny_model: Path, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with ServerProcess(tiny_model, tmp_path, TMPDIR=str(long)) as server:
        server.wait_until_ready()
        assert list(long.iterdir()) == []
        assert server.end() == 0


@pytest.mark.parametrize("num_servers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_servers_share_a_machine(
    tiny_model: Path, tmp_path: Path, short_tmp: Path, num_servers: int
) -> None:
    folders = [tmp_path / name for name in "abcd"[:num_servers]]
    with ExitStack() as stack:
        servers = []
        for folder in folders:
            folder.mkdir()
            process = ServerProcess(tiny_model, folder, TMPDIR=str(short_tmp))
            servers.append(stack.enter_context(process))
        for server in servers:
            server.wait_until_ready()
        for server in servers:
            with server.client() as http:
                body = {"prompt": "a", "max_tokens": 3}
                assert http.post("/v1/completions", json=body).status_code == 200
        assert len({server.url for server in servers}) == num_servers
        servers[0].end(signal.SIGKILL)
        with servers[1].client() as http:
            assert http.get("/health").status_code == 200
        assert [server.end() for server in servers[1:]] == [0] * (num_servers - 1)
        # What the killed one left is its folder; the next start takes it away.
        with ServerProcess(tiny_model, folders[0], TMPDIR=str(short_tmp)) as next_server:
            next_server.wait_until_ready()
            assert next_server.end() == 0
    assert list(short_tmp.glob("minisgl-*")) == []


def test_a_signal_that_comes_before_the_workers_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    with ServerProcess(tiny_model, tmp_path) as server:
        server.wait_for(lambda: bool(list(server.sockets.glob("minisgl-*"))))
        assert server.end(signal.SIGTERM) == 130
        assert server.leftovers() == []


def test_a_start_that_hangs_is_ended(tiny_model: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny_model, tmp_path, "--startup-timeout-s=6") as server:
        server.wait_for(lambda: len(server.workers()) == 2)
        server.workers()[1].suspend()  # as one that waits for something for ever
        assert server.wait() == 1
        assert "minisgl: --startup-timeout-s 6: " in server.log
        assert "scheduler 0 did not become ready in time" in server.log
        assert server.leftovers() == []


@pytest.mark.parametrize("number", [0, 1], ids=["text", "scheduler"])
def test_a_worker_that_fails_at_start_is_named(
    tiny_model: Path, tmp_path: Path, number: int
) -> None:
    with ServerProcess(tiny_model, tmp_path) as server:
        server.wait_for(lambda: len(server.workers()) == 2)
        server.workers()[number].kill()
        assert server.wait() == 1
        name = ("detokenizer 0", "scheduler 0")[number]
        assert f"minisgl: {name} was killed by signal 9" in server.log
        assert server.leftovers() == []


@pytest.mark.parametrize(
    "line",
    [
        r"cache \w+: \w+ \(minisgl-core ",
        r"policy \w+: \w+ \(minisgl-core ",
        r"attention auto: prefill \w+ \(\S+ .*, decode \w+ \(.*; refused: .*fa .*: needs ",
        r"kernels auto: .*torch \(minisgl-core ",
        r"comm auto: \w+ \(",
        r"model LlamaForCausalLM: ",
        r"KV cache: 512 pages of \d+ tokens, [0-9.]+ GiB",
        r"requests of up to 2048 tokens, \d+ at once; started in ",
    ],
)
def test_the_start_says_what_was_chosen_and_why(server: ServerProcess, line: str) -> None:
    before_ready = server.log.partition("ready: serving")[0]
    assert re.search(line, before_ready) is not None, before_ready


def test_it_has_one_process_for_each_part(server: ServerProcess) -> None:
    assert len(server.workers()) == 2  # both directions of text share one
    names = [" ".join(p.cmdline()) for p in psutil.Process(server.process.pid).children()]
    assert sum("resource_tracker" in name for name in names) == len(names) - 2


def test_a_socket_folder_is_private_and_goes_with_its_owner() -> None:
    with SocketFolder() as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(folder.path / "tokenizer-63")) <= 107
        with SocketFolder():
            assert folder.path.exists()  # the second one took it for no stale one
    assert not folder.path.exists()
