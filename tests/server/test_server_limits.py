"""Who may use the server, how much, and what happens to those who leave."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

import httpx
import pytest

from tests.server.server_process import ServerProcess

KEY = "secret-2"
AUTH = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "a", "ignore_eos": True, "max_tokens": 1900}


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
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
        "--log-interval-s=0.3",
        "--served-model-name=served,also",
    ]
    with ServerProcess(tiny_model, folder, *flags) as server:
        server.wait_for(lambda: '"message": "ready' in server.log, 240)
        yield server


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


def gauge(http: httpx.Client, name: str) -> float:
    found = re.search(rf"^minisgl:{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


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
    def post(number: int) -> httpx.Response:
        return member.post("/v1/completions", json=LONG | {"max_tokens": 200})

    with ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(post, range(10)))
    refused = [response for response in responses if response.status_code == 503]
    assert len(refused) >= 5
    assert len(refused) + sum(response.status_code == 200 for response in responses) == 10
    assert all(response.headers["retry-after"] for response in refused)
    assert all(response.json()["error"]["code"] == "overloaded" for response in refused)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_its_request(member: httpx.Client, is_stream: bool) -> None:
    body = LONG | {"stream": is_stream}
    if is_stream:
        with member.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
    else:
        with pytest.raises(httpx.TimeoutException):
            member.post("/v1/completions", json=body, timeout=0.5)
    assert wait_until(lambda: gauge(member, "num_requests_running") == 0, 2.0)
    # All pages are free or can be evicted.
    assert gauge(member, "kv_cache_usage_perc") == 0


def test_leaving_frees_all_choices(member: httpx.Client) -> None:
    with pytest.raises(httpx.TimeoutException):
        member.post("/v1/completions", json=LONG | {"n": 3}, timeout=0.5)
    assert wait_until(lambda: gauge(member, "num_requests_running") == 0, 2.0)
    assert gauge(member, "num_requests_waiting") == 0


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


def test_aborting_what_is_not_there_is_a_404(member: httpx.Client) -> None:
    assert member.post("/abort", json={"request_id": "cmpl-1"}).status_code == 404
    assert member.post("/abort", json={}).status_code == 400


def test_a_waiting_stream_is_kept_alive(member: httpx.Client) -> None:
    with ThreadPoolExecutor(3) as pool:
        body = LONG | {"max_tokens": 300}
        busy = [pool.submit(member.post, "/v1/completions", json=body) for _ in range(2)]
        assert wait_until(lambda: gauge(member, "num_requests_running") == 2)
        waiting = member.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert all(each.result().status_code == 200 for each in busy)
    assert waiting.text.startswith(": ")
    assert waiting.text.endswith("data: [DONE]\n\n")


def test_the_log_is_json_and_tells_the_load(guarded: ServerProcess, member: httpx.Client) -> None:
    member.post("/v1/completions", json=LONG | {"max_tokens": 500})
    assert wait_until(lambda: '"output_tokens_per_s"' in guarded.log)
    others = [line for line in guarded.log.splitlines() if not line.startswith('{"time": "')]
    assert others == []


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
