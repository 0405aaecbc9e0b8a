from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from minisgl.cli.main import main
from minisgl.errors import OutputError, RequestError
from minisgl.sampling_params import SamplingParams
from minisgl_server.chat.display import Display, MarkdownDisplay, PlainDisplay, split_blocks
from minisgl_server.chat.session import ChatSession, talk

NOT_UTF8 = r"the line: is not UTF-8 text: it has the lone surrogate '\udce9'"


class Echo:
    """Answers with the last message, word by word; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Mapping[str, str]]] = []

    def __call__(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams
    ) -> Iterator[str]:
        self.asked.append(list(messages))
        for word in messages[-1]["content"].split():
            if word == "stop":
                raise KeyboardInterrupt
            if word == "fail":
                raise RequestError("prompt: too long")
            yield word


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def session(echo: Echo) -> ChatSession:
    return ChatSession(echo, SamplingParams())


class Shown(Display):
    """Keeps what is shown and told."""

    def __init__(self) -> None:
        self.text = ""
        self.told: list[str] = []

    def piece(self, text: str) -> None:
        self.text += text

    def finish(self) -> None:
        self.text += "\n"

    def tell(self, text: str) -> None:
        self.told.append(text)


def say(session: ChatSession, *lines: str) -> tuple[str, list[str]]:
    """What is shown and told for some lines of input."""
    display = Shown()
    inputs = iter(lines)

    def read() -> str:
        try:
            return next(inputs)
        except StopIteration:
            raise EOFError from None

    talk(session, read, display)
    return display.text, display.told


def test_the_conversation_is_remembered(session: ChatSession, echo: Echo) -> None:
    assert say(session, "one two", "three") == ("onetwo\nthree\n", [])
    assert [m["content"] for m in echo.asked[1]] == ["one two", "onetwo", "three"]


def test_output_that_cannot_be_written_ends_the_chat(session: ChatSession, echo: Echo) -> None:
    class Full(Shown):
        def piece(self, text: str) -> None:
            raise OutputError("stdout: cannot be written: No space left on device")

    inputs = iter(["one", "two"])
    with pytest.raises(OutputError):
        talk(session, lambda: next(inputs), Full())
    assert len(echo.asked) == 1


def test_resetting_and_a_system_message_begin_anew(session: ChatSession, echo: Echo) -> None:
    say(session, "one", "/reset", "two", "/system be brief", "three")
    assert [m["content"] for m in echo.asked[1]] == ["two"]
    assert [m["role"] for m in echo.asked[2]] == ["system", "user"]


def test_a_backslash_goes_on_in_the_next_line(session: ChatSession, echo: Echo) -> None:
    say(session, "one\\", "two\\")
    assert echo.asked[0][0]["content"] == "one\ntwo"


def test_a_stopped_answer_is_kept_and_a_failed_question_is_not(session: ChatSession) -> None:
    shown, told = say(session, "a stop b", "c fail")
    assert shown == "a [stopped]\nc\n"
    assert told == ["prompt: too long"]
    assert [m["content"] for m in session.messages] == ["a stop b", "a"]


def test_a_saved_conversation_can_be_loaded(session: ChatSession, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    say(session, "/system be brief", "héllo", f"/save {path}")
    other = ChatSession(Echo(), SamplingParams())
    _, told = say(other, f"/load {path}", "/undo", f"/load {path}")
    assert told == ["2 messages", "0 questions left", "2 messages"]
    assert (other.system, other.messages) == (session.system, session.messages)


@pytest.mark.parametrize(
    "line",
    [
        "/nothing",
        "/save",
        "/save /nowhere/x",
        "/save ~nosuchuser/x",
        "/save a\0b",
        f"/save {'x' * 5000}",
        "/load /nowhere",
        "/load ~nosuchuser/x",
        "/load a\0b",
    ],
)
def test_a_command_that_cannot_be_is_told(session: ChatSession, line: str) -> None:
    shown, (*_, told) = say(session, "before", line)
    assert shown == "before\n"
    assert told.startswith(line.split()[0])
    assert len(session.messages) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[1]",
        b'{"messages": 5}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_a_file_that_is_no_conversation_leaves_the_present_one(
    session: ChatSession, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    shown, (told,) = say(session, "before", f"/load {path}", "after")
    assert shown == "before\nafter\n"
    assert told.startswith(f"/load {path}: ")
    assert len(session.messages) == 4


def test_a_line_that_is_not_utf8_is_told_and_does_nothing(
    session: ChatSession, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    lines = ["one", "/system caf\udce9", "caf\udce9", f"/save {path}"]
    assert say(session, *lines) == (
        "one\n",
        [NOT_UTF8, NOT_UTF8, f"saved 2 messages to {path}"],
    )


def test_leaving_works_after_any_failure(session: ChatSession) -> None:
    with_exit = say(session, "/load ~nosuchuser/x", "/exit", "not read")
    assert with_exit[0] == ""
    assert session.messages == []


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--top-k=0", "--top-k 0: must be an integer from 1 to 2147483647, or -1 for no limit"),
        ("--max-tokens=0", "--max-tokens 0: must be an integer from 1 to 2147483647"),
        ("--temperature=nan", "--temperature nan: must be a number from 0 to 100"),
        ("--system=caf\udce9", NOT_UTF8.replace("the line", "--system")),
    ],
)
def test_a_wrong_sampling_flag_is_named_as_a_flag(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], flag: str, complaint: str
) -> None:
    assert main(["chat", str(tiny_model), flag]) == 2
    assert capsys.readouterr().err == f"minisgl: {complaint}\n"


def test_a_pipe_may_hold_a_line_of_another_encoding(tiny_model: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "minisgl", "chat", str(tiny_model), "--max-tokens=4"],
        input=b"caf\xe9\n/undo\n",
        capture_output=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[-2:] == [NOT_UTF8.encode(), b"0 questions left"]


def test_leaving_ends_the_conversation(session: ChatSession) -> None:
    assert say(session, "/exit", "not read") == ("", [])


def rendered(*pieces: str) -> str:
    console = Console(file=StringIO(), force_terminal=True, width=40, height=10)
    display = MarkdownDisplay(console)
    for piece in pieces:
        display.piece(piece)
    display.finish()
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_markdown_is_rendered_while_it_grows() -> None:
    text = rendered("# Ti", "tle\n\nSome **bo", "ld** text\n\n", "```python\nx = 1\n", "```\n")
    assert "\x1b[1mbold\x1b[0m" in text
    assert "```" not in text


def test_an_answer_longer_than_the_screen_is_there_in_full() -> None:
    paragraphs = [f"paragraph {i}" for i in range(40)]
    text = rendered(*("\n\n".join(paragraphs)))
    # Each was printed for good, which no later control sequence takes back.
    assert [p for p in paragraphs if f"{p} " not in text and f"{p}\n" not in text] == []


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one\n\n", ""),  # a list may follow
        ("one\n\ntwo", "one\n\n"),
        ("- one\n\n- two", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("1. a\n\n   b\n\nc\n\nd", "1. a\n\n   b\n\nc\n\n"),
    ],
)
def test_blocks_are_complete_when_nothing_can_change_them(text: str, done: str) -> None:
    assert split_blocks(text) == (done, text[len(done) :])


def test_plain_text_goes_out_as_it_is() -> None:
    output = StringIO()
    display = PlainDisplay(output)
    for piece in ("**a", "** b"):
        display.piece(piece)
    display.finish()
    display.finish()  # nothing was shown since
    assert output.getvalue() == "**a** b\n"


@pytest.mark.parametrize(
    ("command", "text"), [("chat", "hi\n"), ("chat", ""), ("serve --shell", "hi")]
)
def test_it_works_through_a_pipe(tiny_model: Path, command: str, text: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "minisgl", *command.split(), str(tiny_model), "--max-tokens=4"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert bool(run.stdout.strip()) is bool(text)
    assert "Traceback" not in run.stderr


def test_it_works_in_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minisgl", "chat", str(tiny_model), "--max-tokens=4"]
    # The last one: nobody answers questions about where the cursor is.
    env = {
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm",
        "HOME": str(tmp_path),
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    main, terminal = pty.openpty()
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | env,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as chat:
        os.close(terminal)
        shown = b""
        for text in (b"one\x1b\rtwo\r", b"/save chat.json\r", b"/exit\r"):  # Alt+Enter is one
            shown += read_until(main, b"\x1b[?2004h")  # it is at its prompt
            os.write(main, text)
        shown += read_until(main, None)
    os.close(main)
    assert chat.returncode == 0, shown
    assert b"is ready" in shown
    assert b"saved 2 messages" in shown
    assert "+one\n+two\n" in (tmp_path / ".local/state/minisgl/chat_history").read_text()


def read_until(terminal: int, text: bytes | None) -> bytes:
    """What a terminal shows until some text, or until nobody writes to it any more."""
    shown = b""
    while text is None or text not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # so does Linux say that all others have closed it
            assert text is None, shown
            return shown
    return shown
