"""Standard output that says in one line why it cannot be written, instead of a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

from minisgl.errors import OutputError


class CheckedOutput:
    """A text stream whose failures are `OutputError`; all else is the stream's own.

    A reader that has gone stays a `BrokenPipeError`: that is no failure of anybody.
    """

    def __init__(self, inner: TextIO, *, is_closed: bool = False) -> None:
        """Stand around a stream; ``is_closed`` makes every write fail."""
        self._inner = inner
        self._is_closed = is_closed

    def write(self, text: str) -> int:
        """Write; see `io.TextIOBase.write`.

        Raises:
            OutputError: It cannot be written.
        """
        with _named_failures():
            if self._is_closed:
                raise OSError("is closed")
            return self._inner.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one by one; see `write`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush; see `write`."""
        with _named_failures():
            self._inner.flush()

    def __getattr__(self, name: str) -> Any:  # Any: attributes of every type
        return getattr(self._inner, name)


@contextmanager
def checked_output() -> Iterator[None]:
    """Have standard output checked inside the block, and flush it at the end.

    What cannot be written by then is dropped, so that the interpreter does not fail when it exits.
    Standard error that is closed is replaced by one that goes nowhere.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        inner = nowhere if sys.stdout is None else sys.stdout
        checked = CheckedOutput(inner, is_closed=sys.stdout is None)
        errors = nowhere if sys.stderr is None else sys.stderr
        with redirect_stdout(cast("TextIO", checked)), redirect_stderr(errors):
            try:
                yield
            finally:
                try:
                    inner.flush()
                except (OSError, ValueError):
                    _drop(inner)


def _drop(stream: TextIO) -> None:
    """Let go of what a stream still holds."""
    with suppress(OSError, ValueError, io.UnsupportedOperation):
        number = os.open(os.devnull, os.O_WRONLY)
        os.dup2(number, stream.fileno())
        os.close(number)
        stream.flush()


@contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise OutputError(
            f"stdout: its encoding {error.encoding} has no {found!a}; "
            "PYTHONIOENCODING=utf-8 has every character"
        ) from error
    except (OSError, ValueError) as error:  # a closed stream is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OutputError(f"stdout: cannot be written: {reason}") from error
