"""The errors that minisgl raises on purpose; everything else that escapes is a bug."""

from __future__ import annotations

import logging


class MinisglError(Exception):
    """Base of every error that minisgl raises on purpose."""


class SettingsError(MinisglError, ValueError):
    """A flag, environment variable or file key has a value that is not allowed."""


class RequestError(MinisglError, ValueError):
    """One request asks for something that cannot be done; other requests are not affected."""


class PluginError(MinisglError):
    """A backend that was asked for is missing, broken, ambiguous or for another plugin API."""


class ProcessorError(PluginError):
    """A logits processor of a plugin failed with the requests of a step; the engine did not."""


class BackendError(PluginError):
    """A backend of a plugin raised while a step was run; what it raised is the cause."""


class CompileError(PluginError):
    """Native code cannot be compiled or loaded on this machine."""


class ModelError(MinisglError):
    """A model cannot be run: unknown architecture or option, damaged or missing weights."""


class CapacityError(MinisglError):
    """There is not enough room, and nothing was changed."""


class ProtocolError(MinisglError):
    """A message from another process is malformed or of an unregistered type."""


class IntegrityError(MinisglError, AssertionError):
    """The books do not add up, such as a page freed twice: a bug in whoever made the call."""


class OutputError(MinisglError):
    """Standard output is full, closed, or cannot show a character."""


class CommError(MinisglError):
    """The ranks of a tensor-parallel group could not meet, or one of them is gone."""


class WorkerError(MinisglError):
    """A worker process could not start, or died; the message gives the cause."""


def log_in_full(logger: logging.Logger, error: MinisglError) -> None:
    """Log an error with its traceback, for a process that ends because of it.

    Users need its message, so the traceback is for DEBUG. That of a `BackendError` is an ERROR: the
    plugin's author has to find out why.

    Args:
        logger: Of whoever caught it.
        error: What was caught.
    """
    level = logging.ERROR if isinstance(error, BackendError) else logging.DEBUG
    logger.log(level, "the error in full", exc_info=error)
