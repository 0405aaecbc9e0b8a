"""Routes about the server itself: health, version, models, metrics, abort, flush."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minisgl.errors import CapacityError
from minisgl_server.api.completions import asking
from minisgl_server.api.errors import ApiError, unavailable
from minisgl_server.api.requests import read_model
from minisgl_server.api.schemas import AbortRequest
from minisgl_server.state import ServerState

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATS_TIMEOUT_S = 1.0


class AdminRoutes:
    """The routes; each is one of FastAPI's path operations."""

    def __init__(self, state: ServerState) -> None:
        """Serve with ``state``."""
        self._state = state

    async def health(self) -> Response:
        """Say whether requests can be answered; needs no key."""
        failure = self._state.client.failure
        if failure is not None:
            raise unavailable(failure)
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """Return the versions of the installed distributions."""
        versions = self._state.versions
        return JSONResponse(
            {"version": versions.get("minisgl-server", ""), "distributions": versions}
        )

    async def models(self) -> Response:
        """List the names of the served model."""
        cards = [self._card(name) for name in self._state.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, model_id: str) -> Response:
        """Describe the served model."""
        if model_id not in self._state.names:
            raise ApiError(
                404,
                f"the model {model_id!r} is not served; served: {', '.join(self._state.names)}",
                param="model",
                code="model_not_found",
            )
        return JSONResponse(self._card(model_id))

    async def metrics(self) -> Response:
        """Return Prometheus metrics; the scheduler's as of now, or of the last time it answered."""
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                self._state.metrics.on_stats(await self._state.client.stats())
        except (TimeoutError, CapacityError) as error:
            logger.debug("no fresh numbers of the scheduler: %r", error)
        return Response(self._state.metrics.render(), media_type=METRICS_TYPE)

    async def abort(self, request: Request) -> Response:
        """Abort an answer that is being made, by its id, or all of them."""
        body = await read_model(request, AbortRequest, self._state.settings.max_body_size)
        calls = self._state.calls
        if body.abort_all == (body.request_id is not None):
            raise ApiError(400, "request_id: give it, or abort_all", param="request_id")
        if body.abort_all:
            chosen = list(calls.values())
        elif body.request_id in calls:
            chosen = [calls[body.request_id]]
        else:
            raise ApiError(
                404,
                f"request_id {body.request_id!r}: no such answer is being made",
                param="request_id",
                code="request_not_found",
            )
        client = self._state.client
        num_aborted = sum(client.abort(call, "aborted by request") for call in chosen)
        return JSONResponse({"num_aborted": num_aborted})

    async def flush_cache(self) -> Response:
        """Forget cached prefixes that no running request uses."""
        reply = await asking(self._state.client.flush())
        return JSONResponse(
            {"num_flushed_pages": reply.num_flushed_pages, "num_kept_pages": reply.num_kept_pages}
        )

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._state.created,
            "owned_by": "minisgl",
            "root": self._state.facts.model,
            "parent": None,
            "max_model_len": self._state.facts.max_seq_len,
        }
