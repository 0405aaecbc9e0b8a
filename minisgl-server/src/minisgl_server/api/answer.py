"""Turning the pieces of a call into OpenAI's answers: at once, or as server-sent events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minisgl.message.text import FinishedText, TextLogprob
from minisgl_server.api.errors import ApiError, overloaded
from minisgl_server.api.params import from_request_error
from minisgl_server.api.shapes import Shape, usage
from minisgl_server.api.stream import DONE, CallStream, answering, event
from minisgl_server.call import Call, Piece
from minisgl_server.state import ServerState

CLIENT_LEFT = 499
"""Status of an answer that nobody reads, as proxies log it."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client wants to get.

    Attributes:
        num_choices: Choices of each prompt.
        has_logprobs: Whether it asked for log-probabilities.
        has_usage: Whether a stream ends with a usage chunk.
    """

    num_choices: int
    has_logprobs: bool
    has_usage: bool


@dataclass(slots=True)
class Choice:
    """What has come of one sequence; changed by whoever reads the call."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: list[TextLogprob] = field(default_factory=list)
    end: FinishedText | None = None

    @property
    def has_begun(self) -> bool:
        """Whether all that comes before its own text has come."""
        return bool(self.texts or self.logprobs or self.end)

    def collect(self, piece: Piece) -> None:
        """Take a piece.

        Raises:
            ApiError: The sequence was refused, failed or was aborted.
        """
        if piece.text:
            self.texts.append(piece.text)
        if piece.logprob is not None:
            self.logprobs.append(piece.logprob)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        if piece.end is not None:
            check_end(piece.end)
            self.end = piece.end


async def answer_at_once(
    request: Request, state: ServerState, call: Call, shape: Shape, options: AnswerOptions
) -> Response:
    """Wait for all of a call and answer with one object; a client that leaves aborts it.

    Raises:
        ApiError: A sequence was refused, failed or was aborted; the others are aborted too.
    """
    choices = [Choice() for _ in call.uids]
    async with answering(state, call, shape.id, request.receive):
        while pieces := await call.next():
            for piece in pieces:
                choices[piece.number].collect(piece)
    ends = [choice.end for choice in choices if choice.end is not None]
    if len(ends) < len(choices):
        return Response(status_code=CLIENT_LEFT)
    content = []
    for index, (choice, end) in enumerate(zip(choices, ends, strict=True)):
        shape.begin(index, choice.prompt_logprobs)
        logprobs = choice.logprobs if options.has_logprobs else None
        content.append(shape.choice(index, "".join(choice.texts), end, logprobs))
    return JSONResponse(shape.answer(content, usage(ends, options.num_choices)))


class EventStream(CallStream):
    """OpenAI's chunks."""

    def __init__(
        self, state: ServerState, call: Call, shape: Shape, options: AnswerOptions
    ) -> None:
        """Stream ``call``; see `CallStream`."""
        super().__init__(state, call, shape.id)
        self._shape = shape
        self._options = options
        self._choices = [Choice() for _ in call.uids]
        self._ends: dict[int, FinishedText] = {}
        self._echoed: set[int] = set()
        self._has_opened = False

    def events_of(self, pieces: list[Piece]) -> bytes:
        """Write events of pieces, one per sequence and kind."""
        touched: dict[int, Choice] = {}
        for piece in pieces:
            choice = touched.setdefault(piece.number, self._choices[piece.number])
            choice.collect(piece)
        events = [] if self._has_opened else self._opening()
        for index, choice in touched.items():
            if self._shape.has_echo and index not in self._echoed and choice.has_begun:
                self._echoed.add(index)
                self._shape.begin(index, choice.prompt_logprobs)
                none_yet: list[TextLogprob] | None = [] if self._options.has_logprobs else None
                events.append(self._event([self._shape.delta(index, "", none_yet)]))
            # Log-probabilities wait for the text of their tokens, or for the end.
            if choice.texts:
                text = "".join(choice.texts)
                choice.texts.clear()
                events.append(self._event([self._shape.delta(index, text, self._take(choice))]))
            if choice.end is not None and index not in self._ends:
                self._ends[index] = choice.end
                rest = self._take(choice) if choice.logprobs else None
                events.append(self._event([self._shape.ending(index, choice.end, rest)]))
        return b"".join(events)

    def closing(self) -> bytes | None:
        """Write usage, where it was asked for, and the end."""
        if len(self._ends) < len(self._choices):
            return None
        if not self._options.has_usage:
            return DONE
        ends = [self._ends[index] for index in range(len(self._choices))]
        chunk = self._shape.chunk([]) | {"usage": usage(ends, self._options.num_choices)}
        return event(chunk) + DONE

    def _opening(self) -> list[bytes]:
        """Write what comes before everything else: roles."""
        self._has_opened = True
        openings = [self._shape.opening(index) for index in range(len(self._choices))]
        return [self._event([opening]) for opening in openings if opening is not None]

    def _take(self, choice: Choice) -> list[TextLogprob] | None:
        if not self._options.has_logprobs:
            return None
        taken, choice.logprobs = choice.logprobs, []
        return taken

    def _event(self, choices: list[dict[str, Any]]) -> bytes:  # JSON
        chunk = self._shape.chunk(choices)
        if self._options.has_usage:
            chunk["usage"] = None
        return event(chunk)


def check_end(end: FinishedText) -> None:
    """Raise what a terminal result says, unless it is an ordinary end.

    Raises:
        ApiError: The sequence was refused, failed or was aborted.
    """
    if end.refusal == "invalid":
        raise from_request_error(end.detail)
    if end.refusal == "full":
        raise overloaded(end.detail)
    if end.reason == "error":
        raise ApiError(500, end.detail or "the engine failed", code="engine_error")
    if end.reason == "abort":
        raise ApiError(503, f"the request was aborted: {end.detail}", code="aborted")
