"""A conversation and what can be done with it, apart from any terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from minisgl.errors import MinisglError, OutputError, RequestError
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.encode import check_unicode
from minisgl_server.chat.display import Display

Message = dict[str, str]

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (alone: remove it) and begin anew
/undo          take back the last question and its answer
/save FILE     write the conversation as JSON
/load FILE     go on with one that was saved
/help          this list
/exit          leave; so does Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one, and so does one that
ends with Alt+Enter."""


class Answerer(Protocol):
    """Whatever answers conversations."""

    def __call__(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams
    ) -> Iterator[str]:
        """Yield the answer piece by piece.

        Raises:
            RequestError: The conversation cannot be answered, such as for its length.
        """


@dataclass(slots=True)
class ChatSession:
    """One conversation; changed by its own methods.

    Attributes:
        answer: Answers.
        params: How to sample.
        system: System message, or empty.
        messages: Questions and answers so far, without the system message.
    """

    answer: Answerer
    params: SamplingParams
    system: str = ""
    messages: list[Message] = field(default_factory=list)

    @property
    def prompt(self) -> list[Message]:
        """The conversation with its system message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Ask, and show the answer piece by piece.

        An answer that was stopped by Ctrl-C stays as far as it came; a question that cannot be
        answered is not kept.

        Raises:
            RequestError: The question cannot be answered.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self.answer(self.prompt, self.params):
                pieces.append(piece)
                show(piece)
        except KeyboardInterrupt:
            show(" [stopped]")
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def command(self, line: str) -> str:
        """Carry out a line that begins with a slash, and say what was done.

        Raises:
            EOFError: It was ``/exit``.
            RequestError: There is no such command, or it cannot be carried out; the conversation
                is as before.
        """
        name, _, argument = line.strip().partition(" ")
        try:
            return self._carry_out(name, argument.strip())
        except (EOFError, RequestError):
            raise
        # A path, a disk and a file may fail in any way; the conversation must not be lost for it.
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise RequestError(f"{line.strip()}: {reason}") from error

    def _carry_out(self, name: str, argument: str) -> str:
        match name:
            case "/exit" | "/quit":
                raise EOFError
            case "/help":
                return HELP
            case "/reset":
                self.messages.clear()
                return "forgotten"
            case "/system":
                self.system = argument
                self.messages.clear()
                return "system message set" if argument else "no system message"
            case "/undo":
                del self.messages[-2:]
                return f"{len(self.messages) // 2} questions left"
            case "/save":
                return self._save(_path(name, argument))
            case "/load":
                return self._load(_path(name, argument))
        raise RequestError(f"{name}: no such command; /help lists them")

    def _save(self, path: Path) -> str:
        text = json.dumps({"messages": self.prompt}, ensure_ascii=False, indent=2)
        content = f"{text}\n".encode()  # before the file is opened, which empties it
        path.write_bytes(content)
        return f"saved {len(self.messages)} messages to {path}"

    def _load(self, path: Path) -> str:
        loaded = [_message(each) for each in json.loads(path.read_text("utf-8"))["messages"]]
        is_first_system = bool(loaded) and loaded[0]["role"] == "system"
        self.system = loaded.pop(0)["content"] if is_first_system else ""
        self.messages = loaded
        return f"{len(loaded)} messages"


def _message(saved: Any) -> Message:  # JSON, of any shape
    message = {"role": saved["role"], "content": saved["content"]}
    for name, text in message.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} {text!r:.50}: must be text")
        text.encode()  # JSON can write halves of surrogate pairs
    return message


def _path(name: str, argument: str) -> Path:
    if not argument:
        raise RequestError(f"{name}: needs the name of a file")
    return Path(argument).expanduser()


def talk(
    session: ChatSession,
    read: Callable[[], str],
    display: Display,
) -> None:
    """Go on until the input ends.

    Args:
        session: The conversation.
        read: Returns the next input; raises `EOFError` at the end, `KeyboardInterrupt` for Ctrl-C.
        display: Shows answers, and lines about them.
    """
    while True:
        try:
            text = _joined(read)
            check_unicode("the line", text)
            if not text.strip():
                continue
            if text.startswith("/"):
                display.tell(session.command(text))
            else:
                _ask(session, text, display)
        except EOFError:
            return
        except KeyboardInterrupt:
            display.tell("(Ctrl-D or /exit leaves)")
        except OutputError:
            raise  # every answer would be lost like this one
        except MinisglError as error:
            display.tell(str(error))


def _ask(session: ChatSession, text: str, display: Display) -> None:
    """Show an answer, and leave the display in order whatever happens to it."""
    try:
        session.ask(text, display.piece)
    finally:
        display.finish()


def _joined(read: Callable[[], str]) -> str:
    """Read one input, which goes on while its lines end in a backslash."""
    lines = [read()]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read())
        except EOFError:
            break
    return "\n".join(lines)
