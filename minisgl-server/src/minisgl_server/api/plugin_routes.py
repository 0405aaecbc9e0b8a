"""HTTP routes of plugins, beside those of the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match, Mount, Route, WebSocketRoute

from minisgl.errors import PluginError
from minisgl.plugin.hook_plugins import HookPlugins
from minisgl.plugin.hooks import server_routes

_BARE: dict[str, object] = {"headers": []}  # which routes by host read


def add_plugin_routes(app: FastAPI, hooks: HookPlugins) -> None:
    """Add the routes of hook plugins, behind all that are there.

    A plugin is left out with a warning when it offers anything else, or a route that no request
    could reach because an earlier one takes them all.
    """
    server_routes(hooks, BaseRoute, _Adder(app.router.routes))


class _Adder:
    """Adds the routes of one plugin after the other."""

    def __init__(self, known: list[BaseRoute]) -> None:
        self._known = known

    def __call__(self, routes: Sequence[BaseRoute]) -> None:
        """Add all, or none.

        Raises:
            PluginError: One could never be reached.
        """
        added: list[BaseRoute] = []
        for route in routes:
            scopes = list(_scopes(route))
            if scopes and all(_is_taken(scope, (*self._known, *added)) for scope in scopes):
                raise PluginError(f"the route {_words(scopes[0])} is taken")
            added.append(route)
        self._known += added


def _is_taken(scope: dict[str, object], routes: Iterable[BaseRoute]) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


def _scopes(route: BaseRoute) -> Iterator[dict[str, object]]:
    """Yield what requests for a route look like; its parameters stand for themselves."""
    if isinstance(route, Route):
        methods = set(route.methods or ("GET",))
        if "GET" in methods:
            methods.discard("HEAD")  # which Starlette adds, and FastAPI does not
        for method in sorted(methods):
            yield _BARE | {"type": "http", "path": route.path, "method": method}
    elif isinstance(route, WebSocketRoute):
        yield _BARE | {"type": "websocket", "path": route.path}
    elif isinstance(route, Mount):
        yield _BARE | {"type": "http", "path": f"{route.path}/{{path}}", "method": "GET"}


def _words(scope: dict[str, object]) -> str:
    return f"{scope.get('method', 'websocket')} {scope['path']}"
