"""Running code of a plugin so that whatever it raises stays with that plugin."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from minisgl.errors import PluginError

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """Something of a plugin that did not work.

    Attributes:
        subject: What it was, such as ``"attention backend 'fa'"``.
        distribution: Which distribution it came with.
        version: Of the distribution.
        reason: Why, and what to do.
        details: The traceback, or empty.
    """

    subject: str
    distribution: str
    version: str
    reason: str
    details: str = ""

    def __str__(self) -> str:
        """Show everything but the traceback."""
        return f"{self.subject} of {self.distribution} {self.version}: {self.reason}"


def contain(action: Callable[[], _Result]) -> _Result:
    """Run ``action`` and turn whatever it raises into a `PluginError`.

    ``SystemExit`` and the panics of native extensions, which are no ``Exception``, are contained
    like everything else; only the user's interrupt passes.

    Raises:
        PluginError: What ``action`` raised, in one line; the cause is attached. A `PluginError` of
            its own passes as it is.
    """
    try:
        return action()
    except (KeyboardInterrupt, PluginError):
        raise
    except BaseException as error:
        raise PluginError(describe(error)) from error


def describe(error: BaseException) -> str:
    """Return type and message of an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def details_of(error: PluginError) -> str:
    """Return the traceback of what a `PluginError` was made from, or nothing."""
    cause = error.__cause__
    return "" if cause is None else "".join(traceback.format_exception(cause))
