"""The bodies of requests: which parameters exist, and of which type they are.

Ranges of sampling parameters are checked by ``SamplingParams``, the same for every interface.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Int = Annotated[int, Field(strict=True, ge=-(2**63), le=2**64 - 1)]
Priority = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]
Json = dict[str, Any]  # free-form JSON

_UNCHANGED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "documents": (None, []),
    "prompt_logprobs": (None,),
    "length_penalty": (None, 1, 1.0),
    "best_of": (None, 1),
}
"""Parameters of OpenAI and vLLM that would change the answer and that the engine cannot honour:
only values that change nothing are accepted."""

_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters that say nothing about the answer's text."""


def _add_tolerated(schema: Json) -> None:
    """Describe the parameters that are no fields: those above, with what they may be."""
    for name in sorted(_WITHOUT_EFFECT):
        schema["properties"][name] = {"description": "Accepted, without effect"}
    for name, values in _UNCHANGED.items():
        unique = [value for i, value in enumerate(values) if value not in values[:i]]
        described = {"enum": unique, "description": "Only what changes nothing"}
        schema["properties"].setdefault(name, described)


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_add_tolerated)

    default_max_tokens: ClassVar[int | None] = None

    model: StrictStr | None = None
    n: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = Field(
        default=None, description="A text or a list of texts"
    )
    seed: Int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    max_tokens: Int | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    top_k: Int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    priority: Priority | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_ignored(cls, content: Any) -> Any:  # JSON
        if not isinstance(content, dict):
            return content
        kept = {}
        for name, value in content.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in _UNCHANGED:
                if not any(type(value) is type(v) and value == v for v in _UNCHANGED[name]):
                    raise ValueError(f"{name}: is not supported by this server")
            elif name not in _WITHOUT_EFFECT:
                kept[name] = value  # the model refuses it by name
        return kept


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[Json] = Field(min_length=1)
    max_completion_tokens: Int | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: Json | None = None


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: StrictStr | list[StrictStr] | list[TokenId] | list[list[TokenId]] = Field(
        description="A text, a list of texts, a list of token ids (integers from 0 to 2147483647) "
        "or a list of such lists"
    )
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None


class GenerateRequest(BaseModel):
    """Body of ``/generate``."""

    model_config = ConfigDict(extra="forbid")

    prompt: StrictStr
    max_tokens: StrictInt = 16
    ignore_eos: StrictBool = False
    temperature: Number = 0.0
    top_k: Int = -1
    top_p: Number = 1.0


class TokenizeRequest(BaseModel):
    """Body of ``/tokenize``: a prompt or a conversation."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Json] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: Json | None = None
    return_token_strs: StrictBool = False


class DetokenizeRequest(BaseModel):
    """Body of ``/detokenize``."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    tokens: list[TokenId]
    skip_special_tokens: StrictBool = False


class AbortRequest(BaseModel):
    """Body of ``/abort``: the id of one answer, or everything."""

    model_config = ConfigDict(extra="forbid")

    request_id: StrictStr | None = None
    abort_all: StrictBool = False
