"""Runs ``minisgl chat``: in a terminal with history and editing, or through a pipe."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.errors import RequestError
from minisgl.plugin.commands import CommandContext
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.encode import check_unicode
from minisgl_server.chat.display import open_display
from minisgl_server.chat.session import ChatSession, talk

if TYPE_CHECKING:
    from minisgl.llm import LLM

_HISTORY = Path("~/.local/state/minisgl/chat_history")
_PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def run(context: CommandContext) -> int:
    """Talk until the input ends.

    Raises:
        SettingsError: A sampling flag is out of range.
        RequestError: The system message is no UTF-8.
        ModelError: The model cannot be run.
    """
    # Only here, because it imports torch: help and wrong flags do not wait for that.
    from minisgl.llm import LLM  # noqa: PLC0415

    params = _sampling_params(context.arguments)
    system = context.arguments.system or ""
    check_unicode("--system", system)
    is_terminal = sys.stdin.isatty()
    with LLM(**context.filled_settings.given) as llm:
        session = ChatSession(LLMAnswers(llm), params, system)
        display = open_display()
        if is_terminal:
            display.tell(f"{context.filled_settings.model.model} is ready; /help lists commands")
        talk(session, _terminal_reader() if is_terminal else _pipe_reader(), display)
    return 0


class LLMAnswers:
    """Answers with an engine in this process."""

    def __init__(self, llm: LLM) -> None:
        """Use ``llm``, which the caller closes."""
        self._llm = llm

    def __call__(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams
    ) -> Iterator[str]:
        """Yield the answer; see ``Answerer``."""
        chunks = self._llm.stream(self._llm.encode_chat(messages), params)
        for chunk in chunks:
            yield chunk["text"]
            if chunk["finish_reason"] in ("abort", "error"):
                raise RequestError(f"the answer ended early: {chunk.get('error')}")


def _sampling_params(arguments: Namespace) -> SamplingParams:
    given = {name: getattr(arguments, name, None) for name in _PARAMS}
    defaults = {"max_tokens": None, "temperature": 0.7, "top_p": 0.95}
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams.from_flags(defaults | chosen)


def _terminal_reader() -> Callable[[], str]:
    """Return a reader with line editing, and a history that stays."""
    # A pipe needs none of it.
    from prompt_toolkit import PromptSession  # noqa: PLC0415
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory  # noqa: PLC0415
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent  # noqa: PLC0415

    history: History
    try:
        path = _HISTORY.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    except (OSError, RuntimeError):  # the latter: there is no home
        history = InMemoryHistory()
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return lambda: session.prompt("> ", prompt_continuation="  ")


def _pipe_reader() -> Callable[[], str]:
    """Return a reader of lines, each a question; one that is no UTF-8 is for `talk` to refuse."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")

    def read() -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read
