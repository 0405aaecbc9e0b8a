"""``/generate``: the reference system's own endpoint, a stream of bare text."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from minisgl_server.api.answer import check_end
from minisgl_server.api.completions import submit
from minisgl_server.api.params import checked_params
from minisgl_server.api.requests import read_model
from minisgl_server.api.schemas import GenerateRequest
from minisgl_server.api.stream import DONE, CallStream, new_id
from minisgl_server.call import Call, Piece
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
        return _TextStream(self._state, submit(self._state, submission))


class _TextStream(CallStream):
    """Each piece of text as the data of an event; ends with ``[DONE]``."""

    def __init__(self, state: ServerState, call: Call) -> None:
        super().__init__(state, call, new_id("gen"))
        self._has_ended = False

    def events_of(self, pieces: list[Piece]) -> bytes:
        for piece in pieces:
            if piece.end is not None:
                check_end(piece.end)
                self._has_ended = True
        text = "".join(piece.text for piece in pieces)
        # The end of a line inside an event's data is written as the start of another data line.
        lines = "\n".join(f"data: {line}" for line in re.split(r"\r\n|\r|\n", text))
        return f"{lines}\n\n".encode() if text else b""

    def closing(self) -> bytes | None:
        return DONE if self._has_ended else None
