"""Where answers appear: bare text, or Markdown that is rendered while it grows."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live


class Display(ABC):
    """Takes an answer piece by piece, and lines about the conversation."""

    @abstractmethod
    def piece(self, text: str) -> None:
        """Show what is new of the answer."""

    @abstractmethod
    def finish(self) -> None:
        """End the answer, if one has begun."""

    def tell(self, text: str) -> None:
        """Write a line that is no answer, so not to stdout."""
        is_colored = sys.stderr.isatty()
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n" if is_colored else f"{text}\n")
        sys.stderr.flush()


class PlainDisplay(Display):
    """Text as it is, for pipes and files."""

    def __init__(self, output: TextIO) -> None:
        """Write to ``output``."""
        self._output = output
        self._has_begun = False

    def piece(self, text: str) -> None:
        """Write new text at once."""
        self._has_begun = True
        self._output.write(text)
        self._output.flush()

    def finish(self) -> None:
        """End the line."""
        if self._has_begun:
            self._has_begun = False
            self._output.write("\n")
            self._output.flush()


class MarkdownDisplay(Display):
    """Markdown in a terminal.

    Only the last block of an answer can still change its looks. It is drawn again with each piece;
    the blocks before it are printed for good, so that an answer may be longer than the screen.
    """

    def __init__(self, console: Console) -> None:
        """Draw on ``console``."""
        self._console = console
        self._text = ""  # of the last block
        self._live: Live | None = None

    def piece(self, text: str) -> None:
        """Draw new text."""
        self._text += text
        done, rest = split_blocks(self._text)
        if done:
            self._end_live()
            self._print(done)
            self._text = rest
        if self._live is None:
            self._live = self._begin_live()
        self._live.update(_Tail(self._text), refresh=True)

    def finish(self) -> None:
        """Print the last block for good."""
        self._end_live()
        if self._text.strip():
            self._print(self._text)
        self._text = ""

    def _begin_live(self) -> Live:
        # Here and below: only a terminal needs it, and it is an extra.
        from rich.live import Live  # noqa: PLC0415

        live = Live(console=self._console, transient=True, auto_refresh=False)
        live.start()
        return live

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown  # noqa: PLC0415

        self._console.print(Markdown(text))


class _Tail:
    """The end of a block, as much of it as the screen holds."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the last lines."""
        from rich.markdown import Markdown  # noqa: PLC0415
        from rich.segment import Segment  # noqa: PLC0415

        lines = console.render_lines(Markdown(self._text), options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def split_blocks(text: str) -> tuple[str, str]:
    """Tell the blocks of Markdown that are complete from the one that may grow.

    A block ends at an empty line outside of fenced code. A list goes on behind an empty line, so
    one that has begun is kept together.
    """
    end = 0
    fence = ""
    position = 0
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        position += len(line)
        if fence:
            if stripped.startswith(fence) and not stripped.strip(fence[0]):
                fence = ""
        elif stripped[:3] in ("```", "~~~"):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n") and _begins_anew(text[position:]):
            end = position
    return text[:end], text[end:]


def _begins_anew(rest: str) -> bool:
    """Whether what follows an empty line is there, and no part of a list above it."""
    if not rest.strip():
        return False
    first = rest.lstrip("\n")
    return not first[0].isspace() and first[0] not in "-*+0123456789"


def open_display() -> Display:
    """Return what suits stdout: Markdown for a person, if rich is installed."""
    if not sys.stdout.isatty():
        return PlainDisplay(sys.stdout)
    try:
        from rich.console import Console  # noqa: PLC0415
    except ImportError:
        display = PlainDisplay(sys.stdout)
        display.tell("for rendered Markdown: pip install 'minisgl-server[chat]'")
        return display
    return MarkdownDisplay(Console())
