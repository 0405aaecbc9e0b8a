"""``minisgl generate``: text from prompts, offline."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from minisgl.config.load import Settings
from minisgl.errors import SettingsError
from minisgl.plugin.commands import CommandContext
from minisgl.plugin.manager import PluginManager
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.encode import check_unicode

if TYPE_CHECKING:
    from minisgl.completion import Choice, Chunk, Completion
    from minisgl.tokenizer.chat import Message

DEFAULT_MAX_TOKENS = 128

_PLAIN_PARAMS = (
    "min_tokens",
    "top_k",
    "seed",
    "n",
    "logprobs",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

Prompt = str | list[int]


class TextModel(Protocol):
    """The part of `minisgl.llm.LLM` that is used here."""

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams
    ) -> Sequence[Completion]:
        """Complete prompts."""

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[Chunk]:
        """Complete one prompt piece by piece."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of a conversation."""


Opener = Callable[[Settings, PluginManager], AbstractContextManager[TextModel]]
"""Opens the model that the settings name."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long generating took, loading not counted.

    Attributes:
        num_tokens: Tokens generated.
        first_token_s: Seconds to the first piece of text, or ``None`` when it was not streamed.
        total_s: Seconds in all.
        tokens_per_s: Their quotient.
    """

    num_tokens: int
    first_token_s: float | None
    total_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, num_tokens: int, first_token_s: float | None, total_s: float) -> Timing:
        """Work out the rate."""
        return cls(num_tokens, first_token_s, total_s, num_tokens / total_s if total_s > 0 else 0.0)

    def __str__(self) -> str:
        """Write the line that goes to stderr."""
        first = "" if self.first_token_s is None else f", first after {self.first_token_s:.2f} s"
        rate = f"{self.tokens_per_s:.1f} tokens/s"
        return f"{self.num_tokens} tokens in {self.total_s:.2f} s{first}, {rate}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is left to report when the text has been printed.

    Attributes:
        timing: How long it took.
        problems: What went wrong with requests.
    """

    timing: Timing
    problems: list[str]


def run(context: CommandContext) -> int:
    """Generate with the real engine; see `generate`."""
    return generate(context, open_llm)


def open_llm(settings: Settings, plugins: PluginManager) -> AbstractContextManager[TextModel]:
    """Make an engine from settings."""
    # Only now, because it imports torch: a wrong flag is reported without waiting for that.
    from minisgl.llm import LLM  # noqa: PLC0415

    return LLM.from_settings(settings, plugins)


def generate(context: CommandContext, opener: Opener) -> int:
    """Generate; text goes to stdout, streamed as it is made, and timing to stderr.

    Raises:
        SettingsError: No prompt is given, a sampling flag is out of range, or flags contradict
            each other.
        RequestError: A prompt cannot be run.
        ModelError: The model cannot be run.
    """
    arguments = context.arguments
    params = sampling_params(arguments)
    prompts = read_prompts(context)
    can_stream = len(prompts) == 1 and params.n == 1 and not arguments.json
    if arguments.stream and not can_stream:
        raise SettingsError("--stream: goes with one prompt, --n 1 and no --json")
    if arguments.system and not arguments.chat:
        raise SettingsError("--system: goes with --chat")
    check_unicode("--system", arguments.system or "")
    for stop in arguments.stop or ():
        check_unicode("--stop", stop)
    with opener(context.filled_settings, context.plugins) as model:
        inputs = [_encode(model, prompt, arguments) for prompt in prompts]
        if can_stream and arguments.stream is not False:
            answer = _stream(model, inputs[0], params)
        else:
            answer = _at_once(model, prompts, inputs, params, is_json=arguments.json)
    sys.stderr.write(f"{answer.timing}\n")
    for problem in answer.problems:
        sys.stderr.write(f"minisgl: {problem}\n")
    return 1 if answer.problems else 0


def sampling_params(arguments: Namespace) -> SamplingParams:
    """Turn flags into parameters; what was not given keeps its default.

    Raises:
        SettingsError: A value is out of range.
    """
    given = {name: getattr(arguments, name) for name in ("max_tokens", *_PLAIN_PARAMS)}
    chosen = {name: value for name, value in given.items() if value is not None}
    fixed = {"stop": tuple(arguments.stop or ()), "ignore_eos": arguments.ignore_eos}
    return SamplingParams.from_flags({"max_tokens": DEFAULT_MAX_TOKENS, **fixed, **chosen})


def read_prompts(context: CommandContext) -> list[str]:
    """Return the prompts of the command line, a file or a pipe.

    Raises:
        SettingsError: There is none, or the file cannot be read.
        RequestError: One is not UTF-8.
    """
    path = context.arguments.prompt_file
    if path is not None and context.positionals:
        raise SettingsError(f"--prompt-file {path}: there is a prompt on the command line already")
    if context.positionals:
        for prompt in context.positionals:
            check_unicode("PROMPT", prompt)
        return list(context.positionals)
    if path is not None and path != "-":
        try:
            return [Path(path).read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--prompt-file {path}: cannot be read: {error}") from error
    if path == "-" or not (sys.stdin is None or sys.stdin.isatty()):
        text = _read_stdin()
        if text:
            return [text]
    settings = context.filled_settings
    is_guess = settings.origins.get("model") == "MODEL"
    taken = f"; {settings.model.model!r} was taken as MODEL" if is_guess else ""
    raise SettingsError(f"PROMPT: is missing; give it as argument, --prompt-file or stdin{taken}")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise SettingsError("stdin: is closed")
    try:
        text = sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"stdin: cannot be read: {error}") from error
    check_unicode("stdin", text)
    return text


def _encode(model: TextModel, prompt: str, arguments: Namespace) -> Prompt:
    """Put a prompt into the chat template where that was asked for."""
    if not arguments.chat:
        return prompt
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return model.encode_chat([*system, {"role": "user", "content": prompt}])


def _stream(model: TextModel, prompt: Prompt, params: SamplingParams) -> Answer:
    """Print one completion piece by piece."""
    start = time.perf_counter()
    first_s: float | None = None
    num_tokens = 0
    problems: list[str] = []
    for chunk in model.stream(prompt, params):
        if first_s is None:
            first_s = time.perf_counter() - start
        num_tokens += len(chunk["token_ids"])
        sys.stdout.write(chunk["text"])
        sys.stdout.flush()
        problems += _problems(chunk)
    timing = Timing.of(num_tokens, first_s, time.perf_counter() - start)
    sys.stdout.write("\n")
    sys.stdout.flush()
    return Answer(timing, problems)


def _at_once(
    model: TextModel,
    prompts: list[str],
    inputs: Sequence[Prompt],
    params: SamplingParams,
    *,
    is_json: bool,
) -> Answer:
    """Make all completions, then print them."""
    start = time.perf_counter()
    outputs = model.generate(inputs, params)
    num_tokens = sum(output["usage"]["completion_tokens"] for output in outputs)
    timing = Timing.of(num_tokens, None, time.perf_counter() - start)
    if is_json:
        rows = [{"prompt": p, **output} for p, output in zip(prompts, outputs, strict=True)]
        document = {"outputs": rows, "timing": asdict(timing)}
        sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    else:
        texts = [choice["text"] for output in outputs for choice in output["choices"]]
        sys.stdout.writelines(f"{text}\n" for text in texts)
    sys.stdout.flush()
    choices = [choice for output in outputs for choice in output["choices"]]
    return Answer(timing, [problem for choice in choices for problem in _problems(choice)])


def _problems(result: Choice | Chunk) -> list[str]:
    """Return what went wrong with a request that did not end by itself."""
    if result["finish_reason"] not in ("abort", "error"):
        return []
    return [
        f"the request ended with {result['finish_reason']}: {result.get('error') or 'no reason'}"
    ]
