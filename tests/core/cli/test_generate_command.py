from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl.cli.commands import minisgl_subcommands
from minisgl.cli.generate import Prompt, generate
from minisgl.cli.parser import parse
from minisgl.completion import Choice, Chunk, Completion, Usage
from minisgl.config.load import Settings
from minisgl.errors import RequestError, SettingsError
from minisgl.plugin.commands import CommandContext
from minisgl.plugin.manager import PluginManager
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.chat import Message
from tests.core.plugin.installed import Boot


class EchoModel:
    """Answers with the prompt, a word at a time; records what it was asked."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.params: SamplingParams | None = None
        self.messages: Sequence[Message] = ()
        self.is_open = False
        self.finish_reason = "stop"

    def __call__(self, settings: Settings, plugins: PluginManager) -> EchoModel:
        self.settings = settings
        return self

    def __enter__(self) -> EchoModel:
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams
    ) -> Sequence[Completion]:
        self.params = sampling_params
        return [self._complete(str(prompt), sampling_params.n) for prompt in prompts]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[Chunk]:
        self.params = sampling_params
        for number, word in enumerate(str(prompt).split()):
            yield Chunk(text=f"{word} ", token_ids=[number], finish_reason=None)
        yield Chunk(text="end", token_ids=[9], finish_reason=self.finish_reason, error="it broke")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        self.messages = messages
        return [1, 2, 3]

    def _complete(self, text: str, n: int) -> Completion:
        choice = Choice(
            text=text,
            token_ids=[1, 2],
            finish_reason=self.finish_reason,
            stop_reason=None,
            error=None,
            logprobs=None,
            prompt_logprobs=None,
        )
        usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3, cached_tokens=0)
        return Completion(**choice, usage=usage, choices=[choice] * n)


def given(model: EchoModel) -> Mapping[str, Any]:
    assert model.settings is not None, "the model was not opened"
    return model.settings.given


@pytest.fixture
def model() -> EchoModel:
    return EchoModel()


@pytest.fixture
def context_of(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parse arguments of `minisgl generate`, with an empty stdin."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    plugins = boot(plugins="minisgl-core")
    (command,) = [each for each in minisgl_subcommands() if each.name == "generate"]

    def parsed(*arguments: str) -> CommandContext:
        return parse(plugins, command, arguments)

    return parsed


def test_one_prompt_is_streamed_and_timed(
    context_of: Any, model: EchoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(context_of("demo", "a b"), model) == 0
    printed = capsys.readouterr()
    assert printed.out == "a b end\n"
    assert printed.err.startswith("3 tokens in ")
    assert "first after" in printed.err
    assert not model.is_open


def test_several_prompts_are_printed_in_order(
    context_of: Any, model: EchoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(context_of("--model", "demo", "first", "--max-tokens", "3", "second"), model)
    assert capsys.readouterr().out == "first\nsecond\n"


def test_every_completion_of_a_prompt_is_printed(
    context_of: Any, model: EchoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(context_of("demo", "p", "--n", "3"), model)
    assert capsys.readouterr().out == "p\np\np\n"


def test_json_is_one_document(
    context_of: Any, model: EchoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(context_of("demo", "p", "q", "--json"), model)
    document = json.loads(capsys.readouterr().out)
    assert [(each["prompt"], each["text"]) for each in document["outputs"]] == [
        ("p", "p"),
        ("q", "q"),
    ]
    assert document["timing"]["num_tokens"] == 4


def test_settings_reach_the_engine_as_keywords(context_of: Any, model: EchoModel) -> None:
    generate(context_of("demo", "p", "--attn", "torch", "--tp", "2", "--no-overlap"), model)
    assert given(model) == {"model": "demo", "attn": "torch", "tp": 2, "overlap": False}


def test_sampling_flags_reach_the_engine(context_of: Any, model: EchoModel) -> None:
    flags = (
        "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3 "
        "--stop x --stop yy --ignore-eos --presence-penalty -1.5"
    )
    generate(context_of("demo", "p", *flags.split()), model)
    assert model.params == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        seed=3,
        stop=("x", "yy"),
        ignore_eos=True,
        presence_penalty=-1.5,
    )


def test_without_flags_sampling_is_greedy_and_short(context_of: Any, model: EchoModel) -> None:
    generate(context_of("demo", "p"), model)
    assert model.params == SamplingParams(max_tokens=128)


@pytest.mark.parametrize(
    "flags",
    [
        *("--temperature -1", "--top-p 2", "--top-k 0", "--max-tokens 0", "--max-tokens -3"),
        *("--n 0", "--min-tokens 5 --max-tokens 2"),
    ],
)
def test_a_sampling_flag_out_of_range_is_refused_before_a_model_is_opened(
    context_of: Any, model: EchoModel, flags: str
) -> None:
    name, value, *_ = flags.split()
    with pytest.raises(SettingsError, match=f"^{name} {value}"):
        generate(context_of("demo", "p", *flags.split()), model)
    assert model.settings is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "caf\udce9"), "PROMPT: is not UTF-8 text"),
        (("demo", "p", "--chat", "--system", "\udce9"), "--system: is not UTF-8 text"),
        (("demo", "p", "--stop", "\udce9"), "--stop: is not UTF-8 text"),
        (("demo", "--prompt-file", "-"), "stdin: is not UTF-8 text"),
    ],
)
def test_text_that_is_not_utf_8_is_refused_before_a_model_is_opened(
    context_of: Any,
    model: EchoModel,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("caf\udce9"))
    with pytest.raises(RequestError, match=message):
        generate(context_of(*arguments), model)
    assert model.settings is None


def test_a_pipe_whose_bytes_cannot_be_decoded_is_refused(
    context_of: Any, model: EchoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", piped)
    with pytest.raises(SettingsError, match="stdin: cannot be read: 'utf-8' codec can't decode"):
        generate(context_of("demo"), model)


def test_a_closed_stdin_is_no_prompt(
    context_of: Any, model: EchoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SettingsError, match="PROMPT: is missing"):
        generate(context_of("demo"), model)


def test_a_chat_goes_through_the_template(context_of: Any, model: EchoModel) -> None:
    generate(context_of("demo", "Hi", "--chat", "--system", "Be brief"), model)
    assert model.messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]


def test_a_prompt_may_come_from_a_file(
    context_of: Any, model: EchoModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("from file")
    generate(context_of("demo", "--prompt-file", str(path), "--no-stream"), model)
    assert capsys.readouterr().out == "from file\n"


@pytest.mark.parametrize("arguments", [("demo",), ("demo", "--prompt-file", "-")])
def test_a_prompt_may_come_from_a_pipe(
    context_of: Any,
    model: EchoModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    generate(context_of(*arguments, "--no-stream"), model)
    assert capsys.readouterr().out == "piped\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("only words",), "PROMPT: is missing; .*'only words' was taken as MODEL"),
        (("--model", "demo"), "PROMPT: is missing; give it as argument, --prompt-file or stdin"),
        (("demo", "--prompt-file", "no/such"), "--prompt-file no/such: cannot be read"),
        (("demo", "p", "--prompt-file", "f"), "--prompt-file f: there is a prompt"),
        (("demo", "p", "q", "--stream"), "--stream: goes with one prompt"),
        (("demo", "p", "--stream", "--json"), "--stream: goes with one prompt"),
        (("demo", "p", "--system", "s"), "--system: goes with --chat"),
    ],
)
def test_contradictions_are_refused_before_a_model_is_opened(
    context_of: Any, model: EchoModel, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        generate(context_of(*arguments), model)
    assert model.settings is None


def test_a_request_that_fails_is_exit_code_1(
    context_of: Any, model: EchoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.finish_reason = "error"
    assert generate(context_of("demo", "p"), model) == 1
    assert "minisgl: the request ended with error: it broke" in capsys.readouterr().err


def test_a_prompt_may_look_like_a_flag(
    context_of: Any, model: EchoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(context_of("--model", "demo", "--no-stream", "--", "--not a flag"), model)
    assert capsys.readouterr().out == "--not a flag\n"
