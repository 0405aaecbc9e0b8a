"""From request bodies to sampling parameters."""

from __future__ import annotations

import re
from typing import Any

from minisgl.errors import RequestError
from minisgl.sampling_params import MAX_LOGPROBS, SamplingParams
from minisgl_server.api.errors import ApiError
from minisgl_server.api.schemas import ChatRequest, CompletionRequest, GenerationRequest

MAX_STOPS = 64

_PLAIN = (
    "n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k",
    "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "skip_special_tokens",
)  # fmt: skip


def sampling_params(body: GenerationRequest, max_choices: int) -> SamplingParams:
    """Read the parameters of a completion or chat; OpenAI's defaults where there are none.

    Raises:
        ApiError: A value is out of range; the error names the parameter.
    """
    given: dict[str, Any] = {"temperature": 1.0}  # Any: fields of many types
    given |= {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.n is not None and not 1 <= body.n <= max_choices:
        message = f"n {body.n}: must be an integer from 1 to {max_choices}"
        raise ApiError(400, message, param="n")
    if body.stop is not None:
        given["stop"] = _stops(body.stop)
    if body.stop_token_ids:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias:
        given["logit_bias"] = _biases(body.logit_bias)
    given["logprobs"] = _logprobs(body)
    given["max_tokens"] = _max_tokens(body)
    if isinstance(body, CompletionRequest) and body.echo:
        given["prompt_logprobs"] = _prompt_logprobs(body)
    return checked_params(**given)


def checked_params(**given: Any) -> SamplingParams:  # Any: fields of many types
    """Make parameters, or an error in the API's form.

    Raises:
        ApiError: A value is out of range.
    """
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise from_request_error(error) from error


def from_request_error(error: RequestError | str, default: str | None = None) -> ApiError:
    """Turn a refusal into a 400 that names the parameter.

    Args:
        error: The refusal.
        default: The parameter, where the message does not begin with one.
    """
    text = str(error)
    match = re.match(r"[a-z_]+(?=[ :\[.])", text)
    known = {*GenerationRequest.model_fields, "messages", "prompt", "chat_template_kwargs"}
    name = match[0] if match and match[0] in known | {"logprobs"} else None
    if name is None and default is not None:
        name, text = default, f"{default}: {text}"
    code = "context_length_exceeded" if "prompt and output together" in text else None
    return ApiError(400, text, param=name, code=code)


def _max_tokens(body: GenerationRequest) -> int | None:
    """Return the limit: the newer name wins, and a huge one is as good as none."""
    limit = body.max_tokens
    name = "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        limit, name = body.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        return body.default_max_tokens
    has_echo = isinstance(body, CompletionRequest) and bool(body.echo)
    lowest = 0 if has_echo else 1
    if limit < lowest:
        raise ApiError(400, f"{name} {limit}: must be at least {lowest}", param=name)
    return min(limit, 2**31 - 1)


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop: {len(stops)} strings, may be at most {MAX_STOPS}", param="stop")
    if not all(stops):
        raise ApiError(400, "stop: an empty string would stop everything", param="stop")
    return tuple(stops)


def _biases(biases: dict[str, float]) -> dict[int, float]:
    for name in biases:
        if not re.fullmatch(r"[0-9]{1,10}", name):
            raise ApiError(400, f"logit_bias: {name!r} is not a token id", param="logit_bias")
    return {int(name): bias for name, bias in biases.items()}


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return what to ask about the prompt; nothing may follow it only if that is asked."""
    return 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs


def _logprobs(body: GenerationRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    assert isinstance(body, ChatRequest), "there are two kinds of completions"
    number = body.top_logprobs or 0
    if not 0 <= number <= MAX_LOGPROBS:
        raise ApiError(
            400,
            f"top_logprobs {number}: must be an integer from 0 to {MAX_LOGPROBS}",
            param="top_logprobs",
        )
    if number and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    return number if body.logprobs else None
