"""Which connections `minisgl bench serve` keeps, which it gives up, and when it asks again."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections import Counter
from pathlib import Path
from shutil import which

import pytest

from minisgl.cli.main import main
from minisgl_server.bench.base_url import parse_base_url
from minisgl_server.bench.connection_pool import ConnectionPool
from minisgl_server.bench.http_stream import time_completion
from tests.server.scripted_server import Reply, ScriptedServer, Then, scripted

EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)
CHUNKS = b"%x;note=1\r\n" % len(EVENTS) + EVENTS + b"\r\n0\r\nX-Trailer: 1\r\n\r\n"
SIZED = b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS
DONE = Reply(CHUNKED)
NOT_HTTP = "the server does not answer in HTTP/1.1"
FAREWELL = b"HTTP/1.1 408 Timeout\r\n\r\n"


def errors(server: ScriptedServer, num: int, timeout_s: float = 30) -> list[str]:
    """Send requests one after the other."""

    async def send() -> list[str]:
        async with ConnectionPool(parse_base_url(server.url)) as pool:
            body = {"model": "m", "prompt": "p", "stream": True}
            return [(await time_completion(pool, body, "", timeout_s)).error for _ in range(num)]

    return asyncio.run(send())


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED,
        b"HTTP/1.1 200 OK\r\n" + SIZED,
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + CHUNKED,
        b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n" + SIZED,
    ],
    ids=["chunks", "length", "hints", "http/1.0"],
)
def test_a_connection_is_kept_for_the_next_request(answer: bytes) -> None:
    with scripted(Reply(answer)) as server:
        assert errors(server, 3) == ["", "", ""]
        assert server.seen == [1, 1, 1]


@pytest.mark.parametrize("load", [["--concurrency=3"], []], ids=["three", "all"])
def test_there_are_as_many_connections_as_requests_at_once(
    load: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    at_once = 3 if load else 12
    with scripted(DONE, at_once=at_once) as server:
        flags = ["--model=m", "--num-requests=12", "--json", f"--url={server.url}", *load]
        assert main(["bench", "serve", *flags]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["num_requests"], report["num_failed"]) == (12, 0)
        assert len(server.seen) == 12
        assert set(Counter(server.seen).values()) == {12 // at_once}


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\n" + SIZED, "keep"),
        Reply(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + SIZED, "close"),
        Reply(b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS, "close"),
        Reply(b"HTTP/1.0 200 OK\r\n" + SIZED, "keep"),
        Reply(CHUNKED, "close"),
    ],
    ids=["later", "says", "ends", "http/1.0", "silently"],
)
def test_a_server_that_closes_after_each_answer_is_no_fault(reply: Reply) -> None:
    with scripted(reply) as server:
        assert errors(server, 3) == ["", "", ""]
        assert server.seen == [1, 2, 3]


@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_request_is_sent_again_if_its_kept_connection_was_closed(then: Then) -> None:
    with scripted(DONE, Reply(b"", then), DONE) as server:
        assert errors(server, 3) == ["", "", ""]
        assert server.seen == [1, 1, 2, 2]


def test_a_request_is_sent_again_only_once_and_fails_alone() -> None:
    with scripted(DONE, Reply(b"", "close"), Reply(b"", "close"), DONE) as server:
        assert errors(server, 3) == ["", NOT_HTTP, ""]
        assert server.seen == [1, 1, 2, 3]


def test_a_request_on_a_new_connection_is_never_sent_again() -> None:
    with scripted(Reply(b"", "close"), DONE) as server:
        assert errors(server, 2) == [NOT_HTTP, ""]
        assert server.seen == [1, 2]


@pytest.mark.parametrize("begin", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", CHUNKED[:-2]])
def test_a_request_is_never_sent_again_once_a_byte_has_come(begin: bytes) -> None:
    with scripted(DONE, Reply(begin, "close"), DONE) as server:
        first, second, third = errors(server, 3)
        assert (first, third) == ("", "")
        assert second.startswith((NOT_HTTP, "the answer is cut"))
        assert server.seen == [1, 1, 2]


def test_a_refused_request_fails_alone_and_leaves_its_connection() -> None:
    refusal = Reply(b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nlater")
    empty = Reply(b"HTTP/1.1 204 No Content\r\n\r\n")
    with scripted(DONE, refusal, empty, DONE) as server:
        assert errors(server, 4) == ["", "status 503: later", "status 204: ", ""]
        assert server.seen == [1, 1, 1, 1]


def test_a_request_that_takes_too_long_fails_alone_with_its_connection() -> None:
    with scripted(DONE, Reply(CHUNKED[:-2]), DONE) as server:
        late = "no complete answer within 0.5 s (--request-timeout-s)"
        assert errors(server, 3, timeout_s=0.5) == ["", late, ""]
        assert server.seen == [1, 1, 2]


def test_an_answer_that_is_wrong_within_fails_alone_with_its_connection() -> None:
    wrong = Reply(CHUNKED.replace(b'"choices"', b'"choicez"'))
    with scripted(DONE, wrong, DONE) as server:
        first, second, third = errors(server, 3)
        assert (first, third) == ("", "")
        assert second.startswith("no event of a completion")
        assert server.seen == [1, 1, 2]


def test_what_follows_an_answer_is_not_taken_for_the_next() -> None:
    with scripted(Reply(CHUNKED + FAREWELL), DONE) as server:
        assert errors(server, 2) == ["", ""]
        assert server.seen == [1, 2]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*make, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.mark.skipif(which("openssl") is None, reason="openssl makes the certificate")
def test_connections_with_tls_are_kept_and_asked_again_alike(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    gone, half = Reply(b"", "close"), Reply(b"HTTP/1.1 ", "close")
    with scripted(DONE, DONE, gone, DONE, Reply(b"", "reset"), DONE, half, tls=tls) as server:
        assert errors(server, 5) == ["", "", "", "", NOT_HTTP]
        assert server.seen == [1, 1, 1, 2, 2, 3, 3]


@pytest.mark.skipif(which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_that_nobody_trusts_is_an_error_of_each_request(
    certificate: tuple[Path, Path],
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    with scripted(DONE, tls=tls) as server:
        for error in errors(server, 2):
            assert error.startswith("SSLCertVerificationError: ")
        assert server.seen == []
