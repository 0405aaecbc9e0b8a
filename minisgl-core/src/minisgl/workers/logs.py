"""Log lines of a server's processes; only processes that we own configure handlers."""

from __future__ import annotations

import json
import logging
import sys
import time

from minisgl.workers.contract import LogOptions

_STANDARD = frozenset(
    (*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName")
)


def configure_logging(options: LogOptions, role: str) -> None:
    """Send this process's log to stderr, each line with its role.

    Args:
        options: Level and format.
        role: Such as ``"scheduler 0"``.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = options.format == "json"
    handler.setFormatter(JsonFormatter(role) if is_json else TextFormatter(role))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)  # or they would be lines of another form
    for name in ("minisgl", "minisgl_server"):
        logging.getLogger(name).setLevel(options.level)


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, role, message."""

    def __init__(self, role: str) -> None:
        """Put ``role`` into each line."""
        super().__init__(f"%(asctime)s %(levelname)-7s {role}: %(message)s", "%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a call passes as ``extra`` becomes fields of it."""

    def __init__(self, role: str) -> None:
        """Put ``role`` into each object."""
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        content |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            content["error"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False, default=str)
