"""What `minisgl bench serve` does with wrong flags, traces and servers: never a traceback."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from minisgl.cli.main import main
from minisgl.errors import SettingsError
from minisgl_server.bench.base_url import BaseUrl, first_model, parse_base_url
from minisgl_server.bench.connection_pool import ConnectionPool
from minisgl_server.bench.http_stream import Timing, time_completion
from minisgl_server.bench.workload import Task, trace_tasks

DEEP = b"[" * 100_000
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Answering = Callable[[bytes], BaseUrl]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts a server that reads one request, sends some bytes and closes."""
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> BaseUrl:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(30)

        def serve() -> None:
            with listener:
                # Whoever only looks whether somebody listens is not answered.
                while not has_answered(listener, answer):
                    pass

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return parse_base_url(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")

    yield start
    for thread in threads:
        thread.join(30)


def has_answered(listener: socket.socket, answer: bytes) -> bool:
    """Take a connection, and answer if there is a request; whether there was."""
    with listener.accept()[0] as connection:
        connection.settimeout(30)
        if not connection.recv(1 << 16):
            return False
        connection.sendall(answer)
        return True


def ok(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + body


def complete(url: BaseUrl) -> Timing:
    async def run() -> Timing:
        async with ConnectionPool(url) as pool:
            body = {"model": "m", "prompt": "p", "stream": True}
            return await time_completion(pool, body, "", 30)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--shared-prefixes=-1", "must be an integer from 0 to 10000000"),
        ("--max-tokens=0", "must be an integer from 1 to 2147483647"),
        ("--prompt-words=0", "must be an integer from 1 to 10000000"),
        (f"--num-requests={10**30}", "must be an integer from 1 to 10000000"),
        ("--goodput-ttft-s=-1", "must be a number above 0"),
        ("--goodput-itl-s=nan", "must be a number above 0"),
        ("--request-rate=inf", "must be a number above 0"),
        ("--request-timeout-s=0", "must be a number above 0"),
        ("--api-key=a\r\nX: y", "--api-key: must be ASCII without spaces"),
    ],
)
def test_a_flag_out_of_range_is_named(
    capsys: pytest.CaptureFixture[str], flag: str, complaint: str
) -> None:
    assert main(["bench", "serve", flag]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"minisgl: {flag.partition('=')[0]}")
    assert line.endswith(complaint)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("ftp://h/v1", "must begin with http:// or https://"),
        ("http://127.0.0.1:abc/v1", "is no URL"),
        ("http://127.0.0.1:99999/v1", "is no URL"),
        ("http://127.0.0.1:0/v1", "is no URL"),
        ("http://[::1/v1", "is no URL"),
        ("http://a..b/v1", "is no URL"),
        ("http://a b/v1", "must be ASCII without spaces"),
        ("http://h/caf\xe9", "must be ASCII without spaces"),
        ("http:///v1", "names no host"),
        ("http://key@h/v1", "a key is given as --api-key"),
        ("http://h/v1?a=b", "without [?] and #"),
    ],
)
def test_a_url_that_cannot_be_asked_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=f"^--url .*: .*{complaint}"):
        parse_base_url(url)


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("http://h/v1/", "h", 80, "/v1"),
        ("https://h", "h", 443, ""),
        ("HTTP://[::1]:7/v1", "::1", 7, "/v1"),
    ],
)
def test_a_url_is_taken_apart(text: str, host: str, port: int, path: str) -> None:
    url = parse_base_url(text)
    assert (url.host, url.port, url.path) == (host, port, path)
    assert not url.text.endswith("/")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("[1]", "must be an object with prompt"),
        ("{", "Expecting property name"),
        ("{}", "prompt None: must be text"),
        ('{"prompt": 5}', "prompt 5: must be text"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens 0: must be an integer from 1 on"),
        ('{"prompt": "a", "max_tokens": "3"}', "max_tokens '3': must be an integer from 1 on"),
        ('{"prompt": "a", "arrival_s": -5}', "arrival_s -5: must be a number of seconds"),
        ('{"prompt": "a", "arrival_s": NaN}', "arrival_s nan: must be a number of seconds"),
        (DEEP.decode(), "is nested too deeply"),
    ],
    ids=range(9),
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, row: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{row}\n')
    with pytest.raises(SettingsError, match=f"^--trace {path}: line 2: {complaint}"):
        trace_tasks(path, None, 1)


def test_a_trace_may_have_empty_lines_and_any_letter(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a\u2028b", "max_tokens": null}\n\n', "utf-8")
    assert trace_tasks(path, None, 7) == [Task("a\u2028b", 7, None)]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (ok(b"[1]"), "lists no model; name one with --model"),
        (ok(b'{"data": null}'), "lists no model"),
        (ok(b'{"data": []}'), "lists no model"),
        (ok(b'{"data": [{"id": 5}]}'), "lists no model"),
        (ok(b"{"), "no answer of OpenAI's API: JSONDecodeError"),
        (ok(DEEP), "no answer of OpenAI's API: RecursionError"),
        (ok(b'{"data"', length=100), "no answer of OpenAI's API: IncompleteRead"),
        (b"hello\r\n\r\n", "no answer of OpenAI's API: BadStatusLine"),
        (b"", "no answer of OpenAI's API: RemoteDisconnected"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404; the base URL mostly ends in /v1"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "status 401; see --api-key"),
    ],
    ids=range(11),
)
def test_a_server_that_lists_no_models_is_told_from_none(
    answering: Answering, answer: bytes, complaint: str
) -> None:
    url = answering(answer)
    with pytest.raises(SettingsError, match=f"^--url {url.text}: GET /v1/models: {complaint}"):
        first_model(url, "key")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "does not answer in HTTP"),
        (b"hello\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 503 Busy\r\n\r\nlater", "status 503: later"),
        (b"HTTP/1.1 503 Busy\r\n\r\n" + b"x" * 200_000 + b"end", "x" * 297 + "end"),
        (CHUNKED + b"0" * ((16 << 20) + 1), "no stream of events"),
        (ok(b""), "the stream ended without usage"),
        (ok(b"data: {\n"), "no event of a completion: {"),
        (ok(b'data: {"a":' + DEEP + b"\n"), "no event of a completion"),
        (ok(b'data: {"choices": null}\n'), 'no event of a completion: {"choices": null}'),
        (ok(b'data: {"choices": [1]}\n'), "no event of a completion"),
        (ok(b'data: {"choices": [], "usage": [1]}\n'), "no event of a completion"),
        (
            ok(b'data: {"choices":[],"usage":{"prompt_tokens":"1","completion_tokens":1}}\n'),
            "no event of a completion",
        ),
        (ok(b'data: {"error": {"message": "full"}}\n'), "the server says full"),
        (ok(b'data: {"error": "full"}\n'), "the server says full"),
        (CHUNKED, "is cut"),
        (CHUNKED + b"9\r\ndat", "is cut"),
        (CHUNKED + b"zz\r\n", "is cut or no stream"),
        (CHUNKED + b"1\r\nabc\r\n", "a chunk is longer than it says"),
        (ok(b"data", length=9), "is cut or no stream of events: 5 of 9 bytes are missing"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nlater", "status 503: later"),
    ],
    ids=range(22),
)
def test_an_answer_that_is_no_completion_is_an_error_of_its_request(
    answering: Answering, answer: bytes, complaint: str
) -> None:
    timing = complete(answering(answer))
    assert complaint in timing.error
    assert timing.end_s >= timing.start_s


def test_what_a_server_says_stays_on_one_line(
    answering: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    url = answering(b"HTTP/1.1 500 Oh\r\n\r\none\ntwo\x1b[2J")
    flags = ["--model=m", "--num-requests=1", "--json", f"--url={url.text}"]
    assert main(["bench", "serve", *flags]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_failed"] == 1
    assert captured.err == "minisgl: status 500: one two [2J\n"


EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
SLOW = {
    "nothing": b"",
    "a part of the head": b"HTTP/1.1 200 OK\r\n",
    "a part of the text": CHUNKED + b"%x\r\n" % len(EVENT) + EVENT + b"\r\n",
}


@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
def test_a_server_that_never_comes_to_an_end_fails_its_requests(
    answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with silent(answer) as url:
        flags = [
            "--model=m",
            "--num-requests=3",
            "--request-timeout-s=0.3",
            "--json",
            f"--url={url}",
        ]
        assert main(["bench", "serve", *flags]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["num_requests"], report["num_failed"]) == (3, 3)
    assert captured.err == "minisgl: no complete answer within 0.3 s (--request-timeout-s)\n"


@contextmanager
def silent(answer: bytes) -> Iterator[str]:
    """Serve some bytes to everybody, and leave all connections open."""
    connections: list[socket.socket] = []

    def serve() -> None:
        while not is_over.is_set():
            connections.append(listener.accept()[0])
            with suppress(OSError):
                connections[-1].sendall(answer)

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            is_over.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join(30)
            for connection in connections:
                connection.close()


@pytest.mark.parametrize("flags", [[], ["--model=m"]], ids=["listed", "named"])
def test_where_nobody_listens_that_is_all_that_is_said(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    assert main(["bench", "serve", f"--url={url}", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"minisgl: --url {url}: no server answers there: ")
    assert captured.err.count("\n") == 1
