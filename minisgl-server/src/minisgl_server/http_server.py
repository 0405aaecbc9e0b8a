"""Runs the application until a signal or a worker's death ends it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from minisgl.workers.heap import settle_heap
from minisgl_server.interrupts import EXIT_INTERRUPTED, Interrupts
from minisgl_server.listener import Listener
from minisgl_server.load_log import log_load
from minisgl_server.processes import WorkerGroup
from minisgl_server.state import ServerState

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_FAREWELL_S = 1.0  # for last errors to be read, and /health to be seen after a worker's death


class HttpServer:
    """One run of the server."""

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        listener: Listener,
        group: WorkerGroup,
        interrupts: Interrupts,
    ) -> None:
        """Prepare.

        Args:
            app: What to serve.
            state: Its state.
            listener: Where to serve it.
            group: The workers that it needs, all ready.
            interrupts: Active; its ``on_ask`` is taken over.
        """
        settings = state.settings
        self._state = state
        self._listener = listener
        self._group = group
        self._interrupts = interrupts
        self._exit_code = 0
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + _FAREWELL_S),
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )

    def run(self) -> int:
        """Serve, drain, and return the exit code; that of an interrupt if one came before."""
        settle_heap()
        asyncio.run(self._run())
        return self._exit_code

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._state.client.attach(self._state.facts)

        def ask(name: str) -> None:
            loop.call_soon_threadsafe(self._drain, name)

        self._interrupts.on_ask = ask
        if self._interrupts.is_asked:  # it came between the start and now
            self._exit_code = EXIT_INTERRUPTED
            return
        for worker in self._group.workers:
            loop.add_reader(worker.sentinel, self._on_death)
        interval_s = self._state.settings.log_interval_s
        tasks = [asyncio.create_task(self._announce())]
        if interval_s > 0:
            load = log_load(self._state.client, self._state.metrics, interval_s)
            tasks.append(asyncio.create_task(load))
        try:
            await self._server.serve(sockets=[self._listener.socket])
        finally:
            self._unwatch()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _announce(self) -> None:
        """Say that the server is ready, once it is."""
        while not self._server.started:
            await asyncio.sleep(0.01)
        url = self._listener.url + self._state.settings.root_path
        names = ", ".join(self._state.names)
        logger.info("ready: serving %s at %s (OpenAI clients: base_url %s/v1)", names, url, url)

    def _drain(self, name: str) -> None:
        limit_s = self._state.settings.drain_timeout_s
        logger.info(
            "%s: no new requests; %d sequences get up to %g s to finish",
            name,
            self._state.client.num_open,
            limit_s,
        )
        self._server.should_exit = True
        # Before uvicorn's limit, which would cut them off without an answer.
        asyncio.get_running_loop().call_later(limit_s, self._cut_off)

    def _cut_off(self) -> None:
        """End what has not finished in time, with an error that says so."""
        num_open = self._state.client.num_open
        if num_open:
            logger.warning("%d sequences did not finish in time (--drain-timeout-s)", num_open)
            self._state.client.cut_off("the server ends, and its --drain-timeout-s is over")

    def _on_death(self) -> None:
        """Fail what is open, be unhealthy for a moment, then end."""
        self._unwatch()
        detail = str(self._group.cause())
        logger.error("%s; the server ends", detail)
        self._exit_code = 1
        self._state.client.fail(detail)
        loop = asyncio.get_running_loop()
        loop.call_later(_FAREWELL_S, setattr, self._server, "should_exit", True)

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for worker in self._group.workers:
            loop.remove_reader(worker.sentinel)


class _Server(uvicorn.Server):
    """uvicorn's server without its own signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
