"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from minisgl.errors import CapacityError, RequestError
from minisgl.message.text import ChatPrompt
from minisgl.sampling_params import SamplingParams
from minisgl_server.api.answer import AnswerOptions, EventStream, answer_at_once
from minisgl_server.api.errors import ApiError, overloaded, unavailable
from minisgl_server.api.params import from_request_error, sampling_params
from minisgl_server.api.requests import read_model
from minisgl_server.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from minisgl_server.api.shapes import ChatShape, CompletionShape, Echo, Shape
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
        params = sampling_params(body, self._state.settings.max_choices)
        shape = ChatShape(self._state.names[0])
        return await self._answer(request, body, params, [prompt], shape)

    async def complete(self, request: Request) -> Response:
        """Complete prompts."""
        body = await read_model(request, CompletionRequest, self._state.settings.max_body_size)
        prompts = _prompts(body.prompt, self._state.settings.max_prompts)
        self._check(body)
        params = sampling_params(body, self._state.settings.max_choices)
        echoes: list[Echo] = []
        if body.echo:
            prompts, echoes = await self._echoes(body, prompts)
        echoes = [echo for echo in echoes for _ in range(params.n)]
        shape = CompletionShape(self._state.names[0], echoes)
        return await self._answer(request, body, params, prompts, shape)

    def _check(self, body: GenerationRequest) -> None:
        """Refuse what no parameter by itself is wrong with."""
        check_model(self._state, body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        shape: Shape,
    ) -> Response:
        timeout_s = self._state.settings.request_timeout_s
        is_special = body.add_special_tokens is not False
        submission = Submission(prompts, params, body.priority or 0, timeout_s, is_special)
        options = AnswerOptions(
            num_choices=params.n,
            has_logprobs=params.logprobs is not None,
            has_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        call = submit(self._state, submission)
        if body.stream:
            return EventStream(self._state, call, shape, options)
        return await answer_at_once(request, self._state, call, shape, options)

    async def _echoes(
        self, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> tuple[list[Prompt], list[Echo]]:
        """Return each prompt and its text; as token ids where each of these is to be told."""
        client, is_special = self._state.client, body.add_special_tokens is not False
        told: list[Prompt] = []
        echoes = []
        for prompt in prompts:
            text = prompt
            if isinstance(prompt, list):
                text = await asking(client.decode(prompt), "prompt")
            first = None
            if body.logprobs is not None:
                reply = await asking(client.count(prompt, is_special, must_fit=True))
                prompt, first = reply.token_ids, next(iter(reply.tokens), "")
            told.append(prompt)
            echoes.append(Echo(str(text), first))
        return told, echoes


def submit(state: ServerState, submission: Submission) -> Call:
    """Hand a request to the engine.

    Raises:
        ApiError: It can never fit, too many wait, or the engine is gone.
    """
    try:
        return state.client.submit(submission)
    except RequestError as error:
        raise from_request_error(error) from error
    except CapacityError as error:
        raise _capacity(state, error) from error


async def asking(question: Any, param: str | None = None) -> Any:  # an awaitable of any result
    """Await an answer of the engine client.

    Args:
        question: To the client.
        param: What it is about, where a refusal does not say so.

    Raises:
        ApiError: The question was wrong, or the engine is gone.
    """
    try:
        return await question
    except RequestError as error:
        raise from_request_error(error, param) from error
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
        message = f"prompt: {len(prompt)} prompts, may be at most {max_prompts} (--max-prompts)"
        raise ApiError(400, message, param="prompt")
    ids = [each for each in prompt if isinstance(each, int)]
    if ids:
        return [ids]
    return [each for each in prompt if not isinstance(each, int)]


def _capacity(state: ServerState, error: CapacityError) -> ApiError:
    """Tell a full queue from an engine that is gone."""
    if state.client.failure is not None:
        return unavailable(str(error))
    return overloaded(str(error))
