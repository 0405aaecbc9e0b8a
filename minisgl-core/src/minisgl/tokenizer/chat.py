"""From a chat to token ids, by one path: the chat template, tokenized by the tokenizer itself.

Rendering to text and encoding that text again would add a second BOS for many models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.errors import RequestError
from minisgl.tokenizer.encode import check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # the JSON of a chat message: fields beyond role and content vary

_PROBE = "minisgl-probe"
# What the tokenizer, or whatever it calls, takes itself.
_RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "conversations", "max_length", "messages", "padding", "return_assistant_tokens_mask",
        "return_dict", "return_tensors", "sanitize_control_tokens", "self", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to render a chat.

    Attributes:
        tools: JSON schemas of the functions that the model may call.
        add_generation_prompt: End with the start of the assistant's turn.
        continue_final_message: Leave the last message open, for the model to go on with.
        template: Used in place of the model's own.
        template_kwargs: Further variables of the template, such as ``enable_thinking``.
    """

    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the template defines them


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: ChatOptions | None = None,
) -> list[int]:
    """Tokenize a chat.

    Args:
        tokenizer: The model's.
        messages: With ``role``, and ``content`` as a string, null, or a list of text parts;
            ``tool_calls`` with arguments as JSON text or as an object.
        options: How to render it.

    Returns:
        At least one id; a BOS only if the template has one.

    Raises:
        RequestError: A message is malformed, the model has no chat template, or the template
            refuses the chat; then the message is the template's.
    """
    options = options or ChatOptions()
    chat = _prepare(tokenizer, messages, options)
    ids: list[int] = _apply(tokenizer, chat, options, is_tokenized=True)
    if not ids:
        raise RequestError("messages: the chat template made an empty prompt of them")
    return ids


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: ChatOptions
) -> str:
    """Return the text that `encode_chat` tokenizes.

    Raises:
        RequestError: As there.
    """
    text: str = _apply(
        tokenizer, _prepare(tokenizer, messages, options), options, is_tokenized=False
    )
    return text


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether chats can be rendered without a template of the caller's own."""
    return bool(getattr(tokenizer, "chat_template", None))


def _prepare(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: ChatOptions
) -> list[dict[str, Any]]:  # JSON
    """Check a chat and bring it into the form that its template expects."""
    _check_template(tokenizer, options)
    chat = [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not chat:
        raise RequestError("messages: is empty; at least one message is needed")
    chat = _fit_content(tokenizer, chat, options)
    for i, message in enumerate(chat):
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        check_unicode(f"messages[{i}].content", "".join(texts))
    return chat


def _check_template(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> None:
    if options.template is None and not has_chat_template(tokenizer):
        raise RequestError(
            "messages: this model has no chat template; use plain completions, or give a template"
        )
    reserved = sorted(_RESERVED & set(options.template_kwargs))
    if reserved:
        raise RequestError(f"chat_template_kwargs: {reserved[0]!r} is not for the template")


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[Message],
    options: ChatOptions,
    is_tokenized: bool,
) -> Any:  # ids or text
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in chat],
            tools=None if options.tools is None else [dict(tool) for tool in options.tools],
            chat_template=options.template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=is_tokenized,
            return_dict=False,
            **options.template_kwargs,
        )
    # A template is a program that came with the model: it may fail in any way, and only this
    # request with it.
    except Exception as error:
        raise RequestError(f"chat template: {error}") from error


def _normalize(message: Message, where: str) -> dict[str, Any]:  # JSON
    """Bring a message into the form that templates expect."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: must be an object with role and content")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{where}.role {message.get('role')!r}: must be a string")
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, Sequence) and not isinstance(content, str):
        content = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content: must be a string or a list of text parts")
    normal = {**message, "content": content}
    # Templates test whether the key is there; null means that it is not.
    if normal.get("tool_calls") is None:
        normal.pop("tool_calls", None)
    else:
        normal["tool_calls"] = _tool_calls(normal["tool_calls"], f"{where}.tool_calls")
    return normal


def _text_part(part: Any, where: str) -> dict[str, str]:  # JSON of any shape until checked
    if isinstance(part, str):
        return {"type": "text", "text": part}
    is_text = isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "refusal")
    text = part.get("text", part.get("refusal")) if is_text else None
    if is_text and not isinstance(text, str):
        raise RequestError(f"{where}: a part of type {part['type']!r} needs a string, its text")
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f"{where}: parts of type {kind!r} are not supported; only text is")
    return {"type": "text", "text": text}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:  # JSON
    """Parse the arguments, which clients send as JSON text and templates take as an object."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}: must be a list")
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}[{i}].function: must be an object")
        arguments = _arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _arguments(arguments: Any, where: str) -> dict[str, Any]:  # JSON
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(f"{where}: is not JSON: {error}") from error
    if arguments in (None, "") or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}: must be a JSON object, not {type(arguments).__name__}")
    return dict(arguments)


def _fit_content(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], options: ChatOptions
) -> list[dict[str, Any]]:
    """Join text parts to one string, unless the template only understands parts."""
    if not any(isinstance(message["content"], list) for message in chat):
        return chat
    if _understands_only_parts(tokenizer, options):
        return [
            message
            if isinstance(message["content"], list)
            else {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in chat
        ]
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in chat
    ]


def _understands_only_parts(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> bool:
    """Return whether a template shows text parts, but loses a plain string."""
    for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
        try:
            text = _apply(
                tokenizer, [{"role": "user", "content": content}], options, is_tokenized=False
            )
        except RequestError:
            continue
        if _PROBE in text:
            return isinstance(content, list)
    return False
