"""minisgl: an LLM inference engine that assembles itself from installed plugins.

Importing this package does nothing else: ``LLM`` and ``SamplingParams`` are imported when they are
first asked for, and plugins are discovered when an engine starts.
"""

from __future__ import annotations

# The `minisgl` command imports this before it can deal with Ctrl-C, so it is kept short: `typing`
# alone would take ten times as long as all the rest.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Import the object behind a public name when it is first asked for."""
    from importlib import import_module  # noqa: PLC0415 - as above

    if name == "LLM":
        return import_module("minisgl.llm").LLM
    if name == "SamplingParams":
        return import_module("minisgl.core").SamplingParams
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
