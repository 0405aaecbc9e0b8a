"""``minisgl generate``: text from prompts, offline."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from minisgl.errors import SettingsError
from minisgl.plugin.commands import CommandContext
from minisgl.sampling_params import SamplingParams

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

Messages = list[dict[str, str]]
Output = Mapping[str, Any]  # Any: text, numbers, lists


class TextModel(Protocol):
    """The part of `minisgl.llm.LLM` that is used here."""

    def generate(self, prompts: list[str], params: SamplingParams) -> Sequence[Output]:
        """Complete prompts."""

    def chat(self, messages: list[Messages], params: SamplingParams) -> Sequence[Output]:
        """Answer conversations."""

    def stream(self, prompt: str | Messages, params: SamplingParams) -> Iterator[Output]:
        """Complete one prompt, or answer one conversation, piece by piece."""


Opener = Callable[..., AbstractContextManager[TextModel]]
"""Takes settings as keywords and opens a model."""


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

    def __str__(self) -> str:
        """Write the line that goes to stderr."""
        first = (
            "" if self.first_token_s is None else f", the first after {self.first_token_s:.2f} s"
        )
        return (
            f"{self.num_tokens} tokens in {self.total_s:.2f} s{first}, "
            f"{self.tokens_per_s:.1f} tokens/s"
        )


def run(context: CommandContext) -> int:
    """Generate with the real engine; see `generate`."""
    return generate(context, open_llm)


def open_llm(**settings: Any) -> AbstractContextManager[TextModel]:  # Any: fields have any type
    """Make an engine from settings."""
    # Only now, because it imports torch: a wrong flag is reported without waiting for that.
    from minisgl.llm import LLM  # noqa: PLC0415

    return LLM(**settings)


def generate(context: CommandContext, opener: Opener) -> int:
    """Generate; text goes to stdout, streamed as it is made, and timing to stderr.

    Raises:
        SettingsError: No prompt is given, or flags contradict each other.
        RequestError: A sampling parameter is out of range.
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
    with opener(**context.filled_settings.given) as model:
        if can_stream and arguments.stream is not False:
            timing = _stream(model, prompts[0], params, arguments)
        else:
            timing = _at_once(model, prompts, params, arguments)
    sys.stderr.write(f"{timing}\n")
    return 0


def sampling_params(arguments: Namespace) -> SamplingParams:
    """Turn flags into parameters; what was not given keeps its default.

    Raises:
        RequestError: A value is out of range.
    """
    given = {name: getattr(arguments, name) for name in _PLAIN_PARAMS}
    return SamplingParams(
        max_tokens=DEFAULT_MAX_TOKENS if arguments.max_tokens is None else arguments.max_tokens,
        stop=tuple(arguments.stop or ()),
        ignore_eos=arguments.ignore_eos,
        **{name: value for name, value in given.items() if value is not None},
    )


def read_prompts(context: CommandContext) -> list[str]:
    """Return the prompts of the command line, a file or a pipe.

    Raises:
        SettingsError: There is none, or the file cannot be read.
    """
    path = context.arguments.prompt_file
    if path is not None and context.positionals:
        raise SettingsError(f"--prompt-file {path}: there is a prompt on the command line already")
    if context.positionals:
        return list(context.positionals)
    if path is not None and path != "-":
        try:
            return [Path(path).read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--prompt-file {path}: cannot be read: {error}") from error
    if path == "-" or not sys.stdin.isatty():
        text = sys.stdin.read()
        if text:
            return [text]
    settings = context.filled_settings
    is_guess = settings.origins.get("model") == "MODEL"
    taken = f"; {settings.model.model!r} was taken as MODEL" if is_guess else ""
    raise SettingsError(f"PROMPT: is missing; give it as argument, --prompt-file or stdin{taken}")


def _messages(prompt: str, arguments: Namespace) -> Messages:
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return [*system, {"role": "user", "content": prompt}]


def _stream(model: TextModel, prompt: str, params: SamplingParams, arguments: Namespace) -> Timing:
    """Print one completion piece by piece."""
    start = time.perf_counter()
    first_s: float | None = None
    piece: Output = {}
    source = _messages(prompt, arguments) if arguments.chat else prompt
    for piece in model.stream(source, params):
        if first_s is None:
            first_s = time.perf_counter() - start
        sys.stdout.write(piece["text"])
        sys.stdout.flush()
    total_s = time.perf_counter() - start
    sys.stdout.write("\n")
    return _timing([piece], first_s, total_s)


def _at_once(
    model: TextModel, prompts: list[str], params: SamplingParams, arguments: Namespace
) -> Timing:
    """Make all completions, then print them."""
    start = time.perf_counter()
    if arguments.chat:
        outputs = model.chat([_messages(prompt, arguments) for prompt in prompts], params)
    else:
        outputs = model.generate(prompts, params)
    timing = _timing(outputs, None, time.perf_counter() - start)
    if arguments.json:
        rows = [
            {"prompt": prompt, **output} for prompt, output in zip(prompts, outputs, strict=True)
        ]
        document = {"outputs": rows, "timing": asdict(timing)}
        sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2, default=_plain) + "\n")
    else:
        sys.stdout.writelines(f"{output['text']}\n" for output in outputs)
    return timing


def _timing(outputs: Sequence[Output], first_s: float | None, total_s: float) -> Timing:
    num_tokens = sum(output["usage"]["completion_tokens"] for output in outputs)
    return Timing(num_tokens, first_s, total_s, num_tokens / total_s if total_s > 0 else 0.0)


def _plain(value: Any) -> object:  # Any: whatever json does not know
    """Write records such as log-probabilities as mappings."""
    return asdict(value)
