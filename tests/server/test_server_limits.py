"""Who may use the server, how much, and what happens to those who leave."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from shutil import which

import httpx
import pytest

from minisgl import SamplingParams
from minisgl.message.folder import SocketFolder
from minisgl.workers.contract import Endpoints
from minisgl_server.engine_client import EngineClient, Submission
from minisgl_server.metrics import Metrics
from tests.server.idle import becomes_idle, gauge, num_aborted, wait_until
from tests.server.server_process import ServerProcess

KEY = "secret-2"
AUTH = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "a", "ignore_eos": True, "max_tokens": 1900}


@pytest.fixture(scope="module")
def guarded(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, paced: dict[str, str]
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    flags = [
        "--api-key=secret-1,secret-2",
        "--cors-origins=https://page.example",
        "--root-path=/llm",
        "--max-running-requests=2",
        "--max-queued-requests=1",
        "--num-tokenizer=2",
        "--keep-alive-s=0.2",
        "--log-format=json",
        "--log-level=debug",
        "--log-interval-s=0.3",
        "--served-model-name=served,also",
    ]
    with ServerProcess(tiny_model, folder, *flags, **paced) as server:
        server.wait_for(lambda: '"message": "ready' in server.log)
        yield server


@pytest.fixture
def idle_client() -> Iterator[EngineClient]:
    """Of a server whose workers were never started."""
    with SocketFolder() as folder:
        client = EngineClient(Endpoints(folder.path, 0), Metrics())
        yield client
        client.close()


@pytest.fixture
def guest(guarded: ServerProcess) -> Iterator[httpx.Client]:
    found = re.search(r"at (http\S+/llm) \(", guarded.log)
    assert found is not None
    with httpx.Client(base_url=found[1].removesuffix("/llm"), timeout=120) as http:
        yield http


@pytest.fixture
def member(guest: httpx.Client) -> httpx.Client:
    guest.headers.update(AUTH)
    return guest


def send_only(http: httpx.Client, body: dict[str, object]) -> socket.socket:
    """Ask for a completion; whoever closes the connection has left without its answer."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n"
    head += f"Authorization: Bearer {KEY}\r\n\r\n"
    assert http.base_url.port is not None
    connection = socket.create_connection((http.base_url.host, http.base_url.port))
    connection.sendall(head.encode() + content)
    return connection


def test_every_route_but_health_needs_a_key(guest: httpx.Client) -> None:
    document = guest.get("/openapi.json", headers=AUTH).json()
    assert len(document["paths"]) >= 12
    paths = [p.replace("{model_id}", "m") for p in document["paths"]]
    for path in [*paths, "/openapi.json", "/nothing", "/llm/v1/models", "/health/x"]:
        for method in ("GET", "POST"):
            allowed = path == "/health"
            status = guest.request(method, path).status_code
            assert (status == 401) is not allowed, path


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer secret-3", "Basic secret-2", KEY, "Bearer \xe9"]
)
def test_a_wrong_key_is_refused(guest: httpx.Client, value: str) -> None:
    response = guest.get("/v1/models", headers={b"Authorization": value.encode("latin-1")})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["secret-1", "secret-2"])
def test_each_key_opens_also_below_the_root_path(guest: httpx.Client, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    for path in ("/v1/models", "/llm/v1/models"):
        cards = guest.get(path, headers=headers).json()["data"]
        assert [card["id"] for card in cards] == ["served", "also"]
    assert guest.get("/llm/health").status_code == 200


def test_a_browser_can_send_a_key_as_a_password(guest: httpx.Client) -> None:
    refused = guest.get("/")
    assert refused.headers["www-authenticate"].startswith("Basic")
    page = guest.get("/", auth=("anyone", KEY))
    assert "<title>minisgl</title>" in page.text
    assert guest.get("/v1/models", auth=("anyone", "wrong")).status_code == 401


def test_a_preflight_needs_no_key_and_only_known_origins_pass(guest: httpx.Client) -> None:
    asked = {"Access-Control-Request-Method": "POST"}
    allow = "access-control-allow-origin"
    for origin, status in (("https://page.example", 200), ("https://other.example", 400)):
        response = guest.options("/v1/models", headers=asked | {"Origin": origin})
        assert response.status_code == status
        assert (response.headers.get(allow) == origin) is (status == 200)


def test_a_full_queue_is_a_503_with_retry_after(member: httpx.Client) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(send_only(member, LONG))
        assert wait_until(lambda: gauge(member, "num_requests_running") == 2)
        assert wait_until(lambda: gauge(member, "num_requests_waiting") == 1)
        with ThreadPoolExecutor(9) as pool:
            posts = [pool.submit(member.post, "/v1/completions", json=LONG) for _ in range(9)]
            refused = [post.result() for post in posts]
    assert {response.status_code for response in refused} == {503}
    assert all(response.headers["retry-after"] for response in refused)
    assert {response.json()["error"]["code"] for response in refused} == {"overloaded"}
    assert becomes_idle(member)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt": "a", "n": 4}, "n"),
        ({"prompt": ["a", "b"], "n": 4}, "n"),
        ({"prompt": ["a", "b"], "n": 2}, "prompt"),
        ({"prompt": ["a", "b", "c", "d"]}, "prompt"),
    ],
)
def test_what_no_empty_queue_could_take_is_a_400_that_names_the_limit(
    member: httpx.Client, body: dict[str, object], name: str
) -> None:
    response = member.post("/v1/completions", json=body | {"max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert "at most 3 may run and wait together" in error["message"]
    assert "retry-after" not in response.headers


@pytest.mark.parametrize("num_choices", [1, 3])  # of three one waits
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_its_request(
    member: httpx.Client, is_stream: bool, num_choices: int
) -> None:
    before = num_aborted(member)
    with send_only(member, LONG | {"stream": is_stream, "n": num_choices}):
        num_running = min(num_choices, 2)
        assert wait_until(lambda: gauge(member, "num_requests_running") == num_running)
    assert wait_until(lambda: num_aborted(member) == before + num_choices)
    assert becomes_idle(member)


def test_an_answer_can_be_aborted_by_its_id(member: httpx.Client) -> None:
    with member.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        found = re.search(r"cmpl-\w+", next(line for line in lines if "cmpl-" in line))
        assert found is not None
        aborted = httpx.post(
            member.base_url.join("/abort"), json={"request_id": found[0]}, headers=AUTH
        )
        rest = "\n".join(lines)
    assert aborted.json() == {"num_aborted": 1}
    assert '"code":"aborted"' in rest
    assert "[DONE]" not in rest


def test_an_answer_is_aborted_once(idle_client: EngineClient) -> None:
    call = idle_client.submit(Submission(["a"], SamplingParams()))
    assert [idle_client.abort(call, "asked to") for _ in range(3)] == [True, False, False]


def test_an_answer_that_has_ended_is_not_aborted(idle_client: EngineClient) -> None:
    call = idle_client.submit(Submission(["a"], SamplingParams()))
    idle_client.fail("the engine is gone")
    assert not idle_client.abort(call, "asked to")


def test_aborting_what_is_not_there_is_a_404(member: httpx.Client) -> None:
    assert member.post("/abort", json={"request_id": "cmpl-1"}).status_code == 404
    assert member.post("/abort", json={}).status_code == 400


def test_a_waiting_stream_is_kept_alive(member: httpx.Client) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 2}
    with ExitStack() as busy:
        for _ in range(2):
            busy.enter_context(send_only(member, LONG))
        assert wait_until(lambda: gauge(member, "num_requests_running") == 2)
        with member.stream("POST", "/v1/completions", json=body) as waiting:
            lines = waiting.iter_lines()
            assert next(lines).startswith(": ")
            busy.close()  # which makes room
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert becomes_idle(member)


def test_the_log_is_json_and_tells_the_load(guarded: ServerProcess, member: httpx.Client) -> None:
    num_before = len(guarded.log)
    with send_only(member, LONG):
        assert wait_until(lambda: '"output_tokens_per_s"' in guarded.log[num_before:])
    assert becomes_idle(member)
    others = [line for line in guarded.log.splitlines() if not line.startswith('{"time": "')]
    assert others == []


def test_the_log_has_a_line_for_each_request(guarded: ServerProcess, member: httpx.Client) -> None:
    asked = {"request_id": "mine-1", "method": "GET", "path": "/version", "status": 200}
    member.get("/version", headers={"X-Request-Id": "mine-1"})
    assert wait_until(lambda: '"mine-1"' in guarded.log)
    (line,) = [json.loads(line) for line in guarded.log.splitlines() if '"mine-1"' in line]
    assert {name: line[name] for name in asked} == asked
    assert line["seconds"] >= 0


def test_an_unknown_name_is_refused(member: httpx.Client, tiny_model: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert member.post("/v1/completions", json=body | {"model": "also"}).status_code == 200
    response = member.post("/v1/completions", json=body | {"model": str(tiny_model)})
    assert response.status_code == 404


def test_flushing_forgets_prefixes(member: httpx.Client) -> None:
    body = {"prompt": "remember this " * 10, "max_tokens": 1}
    for _ in range(2):
        usage = member.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert member.post("/flush_cache").json()["num_flushed_pages"] > 0
    usage = member.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_count_requests_and_tokens(member: httpx.Client) -> None:
    def count(name: str) -> float:
        return gauge(member, name)

    names = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
    before = [count(name) for name in names]
    usage = member.post("/v1/completions", json=LONG | {"max_tokens": 7}).json()["usage"]
    after = [count(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [usage["prompt_tokens"], 7, 1]


@pytest.mark.skipif(which("openssl") is None, reason="openssl makes the certificate")
def test_tls_over_a_unix_socket(tiny_model: Path, tmp_path: Path) -> None:
    cert, key, path = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "http.sock"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run(
        [*make, "-keyout", key, "-out", cert, "-days", "2"], check=True, capture_output=True
    )
    flags = (f"--uds={path}", f"--ssl-certfile={cert}", f"--ssl-keyfile={key}")
    with ServerProcess(tiny_model, tmp_path, *flags) as server:
        server.wait_until_ready()
        transport = httpx.HTTPTransport(uds=str(path), verify=False)
        with httpx.Client(transport=transport, base_url="https://localhost") as http:
            assert http.get("/health").status_code == 200
        assert server.end() == 0
        assert not path.exists()
