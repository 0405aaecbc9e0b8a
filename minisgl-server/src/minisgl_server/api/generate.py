"""``/generate``: the reference system's own endpoint, a stream of bare text."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl_server.api.answer import DONE, check_end, event, leaving_with_client
from minisgl_server.api.completions import submit
from minisgl_server.api.errors import ApiError
from minisgl_server.api.params import checked_params
from minisgl_server.api.requests import read_model
from minisgl_server.api.schemas import GenerateRequest
from minisgl_server.call import Call
from minisgl_server.engine_client import Submission
from minisgl_server.state import ServerState


class GenerateRoute:
    """The route."""

    def __init__(self, state: ServerState) -> None:
        """Serve with ``state``."""
        self._state = state

    async def generate(self, request: Request) -> Response:
        """Stream the text of a prompt."""
        settings = self._state.settings
        body = await read_model(request, GenerateRequest, settings.max_body_size)
        params = checked_params(
            max_tokens=body.max_tokens,
            ignore_eos=body.ignore_eos,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
        )
        submission = Submission([body.prompt], params, deadline_s=settings.request_timeout_s)
        return _TextStream(submit(self._state, submission))


class _TextStream(Response):
    """Each piece of text as the data of an event; ends with ``[DONE]``."""

    def __init__(self, call: Call) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._call = call
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with leaving_with_client(receive, self._call):
                await self._run(send)
        except ApiError as error:
            if not self._is_started:
                raise
            await _send(send, event(error.body()), is_last=True)

    async def _run(self, send: Send) -> None:
        has_ended = False
        while pieces := await self._call.next():
            text = "".join(piece.text for piece in pieces)
            for piece in pieces:
                if piece.end is not None:
                    check_end(piece.end)
                    has_ended = True
            if not self._is_started:
                self._is_started = True
                start = {"type": "http.response.start", "status": 200}
                await send(start | {"headers": self.raw_headers})
            if text:
                # A line feed inside an event's data is written as the start of another data line.
                lines = "\n".join(f"data: {line}" for line in text.split("\n"))
                await _send(send, f"{lines}\n\n".encode())
        if has_ended:
            await _send(send, DONE, is_last=True)


async def _send(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
