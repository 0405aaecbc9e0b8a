"""HTTP routes of plugins: which are added, and which leave their plugin out."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from minisgl.cli.main import main
from minisgl.cli.plugin_kinds import PLUGIN_KINDS
from minisgl.plugin.discovery import Offer
from minisgl.plugin.hook_plugins import HookPlugins
from minisgl.plugin.hookspecs import hookimpl
from minisgl_server.api.app import create_app
from minisgl_server.api.plugin_routes import add_plugin_routes
from minisgl_server.state import ServerState


class Gives:
    """A hook plugin that offers routes, or what is none."""

    def __init__(self, result: object) -> None:
        self._result = result

    @hookimpl
    def minisgl_server_routes(self) -> object:
        return self._result


def say_hi(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hi")


async def listen(socket: WebSocket) -> None:
    await socket.close()


MINE = Route("/mine", say_hi)


def load(monkeypatch: pytest.MonkeyPatch, *results: object) -> HookPlugins:
    """Load one hook plugin for each result, which are called p0, p1 and so on."""
    offers = []
    for index, result in enumerate(results):
        name = f"p{index}"
        monkeypatch.setattr(sys.modules[__name__], name, Gives(result), raising=False)
        point = EntryPoint(name, f"{__name__}:{name}", "minisgl")
        offers.append(Offer("minisgl", name, "acme-routes", "1.0", point))
    plugins = HookPlugins()
    # What is registered last is called first.
    plugins.load(reversed(offers))
    return plugins


def test_routes_of_plugins_are_served(
    idle_state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(idle_state)
    add_plugin_routes(app, load(monkeypatch, [MINE], (Route("/other/{name}", say_hi),)))
    http = TestClient(app)
    assert http.get("/mine").text == http.get("/other/x").text == "hi"


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (MINE, "is not a list of routes; put it into a list: [route]"),
        ([5], "returned a list with 5, which is not a route"),
        ([MINE, 5], "returned a list with 5, which is not a route"),
        ([Route("/health", say_hi)], "the route GET /health is taken"),
        ([Route("/v1/models/{name}", say_hi)], "the route GET /v1/models/{name} is taken"),
        ([MINE, Route("/mine", say_hi)], "the route GET /mine is taken"),
        ([Mount("/first", MINE)], "the route GET /first/{path} is taken"),
        ([WebSocketRoute("/listen", listen)], "the route websocket /listen is taken"),
    ],
)
def test_wrong_routes_leave_their_plugin_out(
    idle_state: ServerState, monkeypatch: pytest.MonkeyPatch, result: object, reason: str
) -> None:
    app = create_app(idle_state)
    first = [Mount("/first", MINE), WebSocketRoute("/listen", listen)]
    plugins = load(monkeypatch, first, result)
    num_routes = len(app.routes) + len(first)
    add_plugin_routes(app, plugins)
    assert len(app.routes) == num_routes
    (failure,) = plugins.failures
    assert failure.subject == "hook plugin 'p1'"
    assert failure.reason.startswith("minisgl_server_routes: ")
    assert reason in failure.reason


def test_another_method_of_a_path_is_not_taken(
    idle_state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(idle_state)
    add_plugin_routes(app, load(monkeypatch, [Route("/health", say_hi, methods=["POST"])]))
    assert TestClient(app).post("/health").text == "hi"


def test_a_route_with_one_method_that_is_free_is_served(
    idle_state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Route("/health", say_hi, methods=["GET", "POST"])
    app = create_app(idle_state)
    add_plugin_routes(app, load(monkeypatch, [both]))
    assert TestClient(app).post("/health").text == "hi"


def test_routes_by_host_do_not_keep_others_out(
    idle_state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_host = Host("elsewhere.example", Router([Route("/theirs", say_hi)]))
    app = create_app(idle_state)
    plugins = load(monkeypatch, [by_host], [MINE])
    add_plugin_routes(app, plugins)
    assert not plugins.failures
    assert TestClient(app).get("/mine").text == "hi"
    assert TestClient(app, base_url="http://elsewhere.example").get("/theirs").text == "hi"


def test_new_routes_are_not_given_a_name_of_the_server(
    idle_state: ServerState, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {getattr(route, "path", "")[1:] for route in create_app(idle_state).routes}
    assert set(PLUGIN_KINDS["routes"].reserved) == {path for path in paths if path.isalpha()}
    assert main(["plugins", "new", "routes", "health"]) == 2
    assert "NAME health: has a meaning of its own" in capsys.readouterr().err
