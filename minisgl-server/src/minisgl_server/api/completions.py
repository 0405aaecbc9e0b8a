"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.errors import CapacityError, RequestError
from minisgl.message.text import ChatPrompt
from minisgl_server.api.answer import AnswerOptions, EventStream, answer_at_once
from minisgl_server.api.errors import ApiError, overloaded, unavailable
from minisgl_server.api.params import from_request_error, sampling_params
from minisgl_server.api.requests import read_model
from minisgl_server.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from minisgl_server.api.shapes import ChatShape, CompletionShape, Shape
from minisgl_server.call import Call
from minisgl_server.engine_client import Prompt, Submission
from minisgl_server.state import ServerState


class CompletionRoutes:
    """Both routes; they differ in prompt and shape."""

    def __init__(self, state: ServerState) -> None:
        """Serve with ``state``."""
        self._state = state

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await read_model(request, ChatRequest, self._state.settings.max_body_size)
        prompt = chat_prompt(body, self._state.chat_template)
        self._check(body)
        shape = ChatShape(self._state.names[0])
        return await self._answer(request, body, [prompt], shape, ())

    async def complete(self, request: Request) -> Response:
        """Complete prompts."""
        body = await read_model(request, CompletionRequest, self._state.settings.max_body_size)
        prompts = _prompts(body.prompt, self._state.settings.max_prompts)
        self._check(body)
        if body.echo and body.logprobs is not None:
            raise ApiError(
                400, "echo: log-probabilities of the prompt are not supported", param="echo"
            )
        echoes = await self._echoes(prompts, body.n or 1) if body.echo else []
        shape = CompletionShape(self._state.names[0])
        return await self._answer(request, body, prompts, shape, echoes)

    def _check(self, body: GenerationRequest) -> None:
        """Refuse what no parameter by itself is wrong with."""
        check_model(self._state, body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Prompt],
        shape: Shape,
        echoes: Sequence[str],
    ) -> Response:
        settings = self._state.settings
        params = sampling_params(body, settings.max_choices)
        is_special = body.add_special_tokens is not False
        submission = Submission(
            prompts, params, body.priority or 0, settings.request_timeout_s, is_special
        )
        options = AnswerOptions(
            num_choices=params.n,
            has_logprobs=params.logprobs is not None,
            has_usage=bool(body.stream_options and body.stream_options.include_usage),
            keep_alive_s=settings.keep_alive_s,
            echoes=echoes,
        )
        call = submit(self._state, submission)
        self._state.calls[shape.id] = call
        if body.stream:
            return _Registered(EventStream(call, shape, options), self._state, shape.id)
        async with registered(self._state, shape.id):
            return await answer_at_once(request, call, shape, options)

    async def _echoes(self, prompts: Sequence[Prompt], num_choices: int) -> list[str]:
        """Return each prompt's text, once per choice."""
        texts = []
        for prompt in prompts:
            if isinstance(prompt, list):
                texts.append(await asking(self._state.client.decode(prompt)))
            else:
                texts.append(str(prompt))
        return [text for text in texts for _ in range(num_choices)]


class _Registered(Response):
    """A stream that is listed under its id while it runs."""

    def __init__(self, inner: EventStream, state: ServerState, answer_id: str) -> None:
        super().__init__()
        self._inner = inner
        self._state = state
        self._id = answer_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with registered(self._state, self._id):
            await self._inner(scope, receive, send)


@asynccontextmanager
async def registered(state: ServerState, answer_id: str) -> AsyncIterator[None]:
    """Take an answer off the list at the end."""
    try:
        yield
    finally:
        state.calls.pop(answer_id, None)


def submit(state: ServerState, submission: Submission) -> Call:
    """Hand a request to the engine.

    Raises:
        ApiError: Too many wait, or the engine is gone.
    """
    try:
        return state.client.submit(submission)
    except CapacityError as error:
        raise _capacity(state, error) from error


async def asking(question: Any) -> Any:  # Any: an awaitable of any result
    """Await an answer of the engine client.

    Raises:
        ApiError: The question was wrong, or the engine is gone.
    """
    try:
        return await question
    except RequestError as error:
        raise from_request_error(error) from error
    except CapacityError as error:
        raise unavailable(str(error)) from error


def check_model(state: ServerState, name: str | None) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: It is another one.
    """
    if name is not None and name not in state.names:
        raise ApiError(
            404,
            f"the model {name!r} is not served; served: {', '.join(state.names)}",
            param="model",
            code="model_not_found",
        )


def chat_prompt(body: Any, template: str | None) -> ChatPrompt:  # Any: chat or tokenize request
    """Read the conversation of a body that has one."""
    generation = body.add_generation_prompt
    return ChatPrompt(
        messages=json.dumps(body.messages),
        add_generation_prompt=(
            not body.continue_final_message if generation is None else generation
        ),
        continue_final_message=bool(body.continue_final_message),
        template=template,
        template_kwargs=json.dumps(body.chat_template_kwargs or {}),
    )


def _prompts(
    prompt: str | list[str] | list[int] | list[list[int]], max_prompts: int
) -> list[Prompt]:
    """Tell one prompt from many: a list of ids is one."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt: is an empty list", param="prompt")
    if len(prompt) > max_prompts and not isinstance(prompt[0], int):
        raise ApiError(400, f"prompt: may hold at most {max_prompts} prompts", param="prompt")
    ids = [each for each in prompt if isinstance(each, int)]
    if ids:
        return [ids]
    return [each for each in prompt if not isinstance(each, int)]


def _capacity(state: ServerState, error: CapacityError) -> ApiError:
    """Tell a full queue from an engine that is gone."""
    if state.client.failure is not None:
        return unavailable(str(error))
    return overloaded(str(error))
