"""The page at ``/`` in headless Chromium, as a person uses it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.idle import PATIENCE_S, becomes_idle, num_aborted, wait_until
from tests.server.server_process import ServerProcess

playwright: Any = pytest.importorskip("playwright.sync_api", reason="needs the group 'clients'")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# As root there is no sandbox; the rest keeps the browser from calling its maker.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:  # of a library that may be missing
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Any, server: ServerProcess) -> Iterator[Any]:
    """The page, which must load nothing from elsewhere and complain about nothing."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(1000 * PATIENCE_S)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(server.url)
    yield page
    page.close()
    assert complaints == []
    assert [a for a in addresses if not a.startswith((server.url, "data:"))] == []


@pytest.fixture
def page(browser: Any, server: ServerProcess) -> Iterator[Any]:
    with page_of(browser, server) as page:
        yield page


@pytest.fixture
def slow_page(browser: Any, slow_server: ServerProcess) -> Iterator[Any]:
    """The page of a server whose answers never end by themselves, and last."""
    with page_of(browser, slow_server) as page:
        page.route("**/v1/chat/completions", make_endless)
        yield page


def make_endless(route: Any) -> None:
    """Let a question of the page be answered by as many tokens as it allows."""
    route.continue_(post_data=route.request.post_data_json | {"ignore_eos": True})


def say(page: Any, text: str, **settings: float | str) -> None:
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    page.fill("#text", text)
    page.press("#text", "Enter")


def press_in_the_midst(page: Any, button: str) -> None:
    """Press a button once some of the answer has come."""
    page.wait_for_function("() => document.querySelector('.assistant')?.textContent.length > 5")
    page.click(f"#{button}")


def wait_for_end(page: Any) -> None:
    page.wait_for_selector("#send:visible")


def test_an_answer_grows_as_it_comes_and_is_that_of_the_api(page: Any, http: httpx.Client) -> None:
    page.route("**/v1/chat/completions", make_endless)
    page.evaluate(
        """() => { window.sizes = new Set(); new MutationObserver(() => window.sizes.add(
             document.querySelector('.assistant')?.textContent.length ?? 0
           )).observe(document.getElementById('talk'), {childList: true, subtree: true}); }"""
    )
    say(page, "What is it?", temperature=0, max_tokens=100)
    wait_for_end(page)
    messages = [{"role": "user", "content": "What is it?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 100, "ignore_eos": True}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    bare = str(message["content"]).replace("*", "").replace("`", "")
    shown = page.evaluate("() => document.querySelector('.assistant').textContent")
    assert bare[:40] in shown.replace("*", "").replace("`", "")
    assert "100 tokens" in shown
    assert page.evaluate("() => window.sizes.size") > 10


def test_settings_are_sent(page: Any) -> None:
    with page.expect_request("**/v1/chat/completions") as caught:
        say(
            page,
            "Hello",
            system="Be brief.",
            temperature=0.3,
            top_p=0.8,
            top_k=7,
            min_p=0.05,
            repetition_penalty=1.1,
            max_tokens=9,
            seed=5,
        )
    body = caught.value.post_data_json
    wait_for_end(page)
    assert body.pop("messages") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert body == {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_stop_ends_the_request_and_keeps_what_came(
    slow_page: Any, slow_server: ServerProcess
) -> None:
    with slow_server.client() as http:
        before = num_aborted(http)
        say(slow_page, "Tell me all", temperature=0, max_tokens=1900)
        press_in_the_midst(slow_page, "stop")
        wait_for_end(slow_page)
        assert wait_until(lambda: num_aborted(http) == before + 1)
        assert becomes_idle(http)
    shown = slow_page.evaluate("() => document.querySelector('.assistant').textContent")
    assert shown.endswith("stopped")
    with slow_page.expect_request("**/v1/chat/completions") as caught:
        say(slow_page, "Go on", max_tokens=2)
    wait_for_end(slow_page)
    roles = [message["role"] for message in caught.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_reset_in_the_midst_of_an_answer_begins_a_new_talk(slow_page: Any) -> None:
    say(slow_page, "Tell me all", temperature=0, max_tokens=1900)
    press_in_the_midst(slow_page, "reset")
    wait_for_end(slow_page)
    with slow_page.expect_request("**/v1/chat/completions") as caught:
        say(slow_page, "Anew", max_tokens=2)
    wait_for_end(slow_page)
    assert [m["content"] for m in caught.value.post_data_json["messages"]] == ["Anew"]


def test_the_view_of_the_load_is_live(slow_page: Any, slow_server: ServerProcess) -> None:
    body = {"prompt": ["a", "b"] * 4, "ignore_eos": True, "max_tokens": 1900, "stream": True}
    wait_for = slow_page.wait_for_function
    with slow_server.client() as http, http.stream("POST", "/v1/completions", json=body):
        wait_for("() => Number(document.getElementById('running').textContent) > 1")
        wait_for("() => parseFloat(document.getElementById('kv').textContent) > 0")
        wait_for("() => Number(document.getElementById('rate').textContent) > 0")
        wait_for("() => document.querySelector('#rates polyline').points.length > 1")
    wait_for("() => document.getElementById('running').textContent === '0'")
    wait_for("() => document.getElementById('hits').textContent.endsWith('%')")


def test_code_and_stress_are_shown_as_such_and_html_is_text(page: Any) -> None:
    page.evaluate(
        """() => write(show("assistant", ""), "a **b** `c`\\n```py\\nx = '<b>'\\n```\\n<i>d</i>")"""
    )
    html = page.evaluate("() => document.querySelector('.assistant').innerHTML")
    assert "<strong>b</strong>" in html
    assert "<code>c</code>" in html
    assert "<pre><code>x = '&lt;b&gt;'</code></pre>" in html
    assert "&lt;i&gt;d&lt;/i&gt;" in html


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen(page: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    say(page, "A long question. " * 20, max_tokens=40, seed=1)
    wait_for_end(page)
    page.set_viewport_size({"width": width, "height": 800})
    page.screenshot(path=tmp_path / "page.png")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.is_visible("#temperature") is (width > 700)
    if width < 700:
        page.click("#more")
        assert page.is_visible("#temperature")
