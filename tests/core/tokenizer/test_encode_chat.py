from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from minisgl.errors import RequestError
from minisgl.tokenizer.chat import ChatOptions, encode_chat, has_chat_template
from tests.tiny_models import BOS, build_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
STRICT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] | trim }}{% endfor %}"
)
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}|{% endif %}{% endfor %}{% endfor %}"
)


def render(messages: Any, options: ChatOptions | None = None, template: str | None = None) -> str:
    """Encode a chat and show the tokens as text; ``messages`` may be wrong on purpose."""
    tokenizer = build_tokenizer() if template is None else build_tokenizer(template)
    text = tokenizer.decode(encode_chat(tokenizer, messages, options))
    assert isinstance(text, str)
    return text


def tokenizer_with_bos(template: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(template)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 1)]
    )
    return tokenizer


def test_a_chat_is_what_the_template_makes_of_it() -> None:
    assert render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    without = ChatOptions(add_generation_prompt=False)
    assert render(HELLO, without) == "<|im_start|>user\nHello<|im_end|>\n"


def test_ids_are_those_of_the_tokenizer_s_own_path() -> None:
    tokenizer = build_tokenizer()
    expected = tokenizer.apply_chat_template(
        HELLO, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert encode_chat(tokenizer, HELLO) == expected


def test_a_template_with_bos_gives_exactly_one() -> None:
    ids = encode_chat(tokenizer_with_bos(STRICT_TEMPLATE), HELLO)
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_a_template_without_bos_gives_none() -> None:
    tokenizer = tokenizer_with_bos("{{ messages[0]['content'] }}")
    assert 1 not in encode_chat(tokenizer, HELLO)


def test_a_final_message_can_be_continued() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "The capital"}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert render(chat, options).endswith("<|im_start|>assistant\nThe capital")


def test_template_variables_reach_the_template() -> None:
    options = ChatOptions(template_kwargs={"mood": "gay"})
    template = "{{ mood }}:{{ messages[0]['content'] }}"
    assert render(HELLO, options, template) == "gay:Hello"


def test_a_variable_that_would_change_the_call_is_refused() -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs: 'tokenize' is not for"):
        render(HELLO, ChatOptions(template_kwargs={"tokenize": False}))


def test_a_template_of_the_caller_replaces_the_model_s() -> None:
    options = ChatOptions(template="<{{ messages[0]['content'] }}>")
    assert render(HELLO, options) == "<Hello>"


# tool conversations


def tool_chat(arguments: object, **assistant: object) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "tool_calls": [call], **assistant},
        {"role": "tool", "tool_call_id": "1", "content": "Paris"},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.mark.parametrize("assistant", [{"content": None}, {"content": ""}, {}])
def test_a_tool_call_without_content_shows_no_none(assistant: dict[str, object]) -> None:
    text = render(tool_chat('{"city": "Rome"}', **assistant))
    assert "None" not in text
    assert "<tool_call>look:city=Rome</tool_call>" in text


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_arguments_are_an_object_for_the_template(arguments: object) -> None:
    assert "look:city=Rome<" in render(tool_chat(arguments))


@pytest.mark.parametrize("arguments", ["", "null", " ", None, "{}", {}])
def test_absent_arguments_are_an_empty_object(arguments: object) -> None:
    assert "<tool_call>look:</tool_call>" in render(tool_chat(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("{not json", "is not JSON"), ("[1]", "must be a JSON object"), (3, "must be a JSON object")],
)
def test_malformed_arguments_are_named(arguments: object, message: str) -> None:
    where = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"
    with pytest.raises(RequestError, match=f"{where}: {message}"):
        render(tool_chat(arguments))


def test_the_caller_s_messages_are_not_changed() -> None:
    chat = tool_chat('{"city": "Rome"}', content=None)
    render(chat)
    assert chat == tool_chat('{"city": "Rome"}', content=None)


def test_null_tool_calls_count_as_absent() -> None:
    assert "tool_call" not in render([{"role": "assistant", "content": "x", "tool_calls": None}])


# content as parts

PARTS = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]


def test_text_parts_are_joined_for_a_template_that_takes_strings() -> None:
    assert "user\nHello\nworld<|im_end|>" in render([{"role": "user", "content": PARTS}])


def test_text_parts_stay_parts_for_a_template_that_takes_only_those() -> None:
    chat = [{"role": "system", "content": "Hi"}, {"role": "user", "content": PARTS}]
    assert render(chat, template=PARTS_TEMPLATE) == "system:Hi|user:Hello|world|"


def test_other_parts_are_refused_by_place_and_type() -> None:
    content = [*PARTS, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[2\]: .*'image_url'"):
        render([{"role": "user", "content": content}])


# refusals


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["system", "user"], "System role not supported"),
        (["user", "assistant", "system"], "System role not supported"),
        (["user", "user"], "Conversation roles must alternate"),
    ],
)
def test_what_a_template_refuses_is_an_error_with_its_message(
    roles: list[str], message: str
) -> None:
    chat = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(RequestError, match=f"chat template: {message}"):
        render(chat, template=STRICT_TEMPLATE)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | no_such_filter }}",
        "{% for x in %}",
        "{{ messages[7].content.nothing.there }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages[0]['content'] + 3 }}",
    ],
)
def test_a_broken_template_fails_the_request_only(template: str) -> None:
    with pytest.raises(RequestError, match="chat template: "):
        render(HELLO, template=template)


def test_a_model_without_a_template_refuses_chats() -> None:
    tokenizer = build_tokenizer(chat_template=None)
    assert not has_chat_template(tokenizer)
    with pytest.raises(RequestError, match="this model has no chat template"):
        encode_chat(tokenizer, HELLO)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: is empty"),
        (["hello"], r"messages\[0\]: must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role None: must be a string"),
        ([*HELLO, {"role": 3, "content": "x"}], r"messages\[1\]\.role 3: must be a string"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: must be a string or a list"),
        ([{"role": "user", "content": "", "tool_calls": "x"}], r"tool_calls: must be a list"),
        ([{"role": "user", "tool_calls": [3]}], r"tool_calls\[0\]\.function: must be an object"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(messages)


def test_an_empty_rendering_is_refused() -> None:
    with pytest.raises(RequestError, match="made an empty prompt"):
        render(HELLO, template="{% if false %}x{% endif %}")


def test_half_of_a_surrogate_pair_is_refused_by_place() -> None:
    chat: list[Any] = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "caf\udce9"}]}]
    with pytest.raises(RequestError, match=r"messages\[1\].content: is not UTF-8 text: .*udce9"):
        encode_chat(build_tokenizer(), chat)
