"""``--record``: a trace of a scheduler in a file."""

from __future__ import annotations

import logging
import os
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minisgl import __version__
from minisgl.config.load import Settings
from minisgl.config.sections import CORE_SECTIONS, RecordSettings
from minisgl.engine.contract import EngineLimits, StepEngine
from minisgl.errors import SettingsError
from minisgl.scheduler.io import SchedulerIO
from minisgl.scheduler.record import PrefixNames, Tap
from minisgl.scheduler.record_path import record_path
from minisgl.scheduler.trace import TRACE_FORMAT, Header, Limits, encode_line

logger = logging.getLogger(__name__)


class Recorder:
    """Writes a trace to a file, as ``--record`` asks for.

    Every line is handed to the system whole as soon as there is one, so that a crash of the
    process loses none. A disk that is full ends the recording with a warning, and nothing else.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        """Take a path that was checked; nothing is written before a scheduler starts."""
        self._settings = settings
        self._path = path
        self._tap: Tap | None = None
        self._descriptor = -1
        self._finalizer: weakref.finalize[..., Any] | None = None  # Any: it returns nothing

    @classmethod
    def of(cls, settings: Settings) -> Recorder | None:
        """Return a recorder if the settings ask for one.

        Raises:
            SettingsError: As for `record_path`.
        """
        path = record_path(settings)
        return None if path is None else cls(settings, path)

    def attach(
        self, engine: StepEngine, line: SchedulerIO, backends: dict[str, str]
    ) -> tuple[StepEngine, SchedulerIO]:
        """Return what a scheduler takes in place of its engine and its line.

        Called again when the scheduler is replaced.

        Args:
            engine: The engine.
            line: The scheduler's line.
            backends: Name of what serves each of the scheduler's own kinds.

        Raises:
            SettingsError: The file cannot be made.
        """
        if self._tap is not None:
            self._tap.restart()
            return self._tap.attach(engine, line)
        self._open_file()
        has_prompts = self._settings.section(RecordSettings).record_prompts
        header = make_header(self._settings, engine, backends, has_prompts=has_prompts)
        self._write(encode_line(header))
        names = PrefixNames(header.block_size)
        self._tap = Tap(
            lambda event: self._write(encode_line(event)), names, has_prompts=has_prompts
        )
        return self._tap.attach(engine, line)

    def close(self) -> None:
        """Write the end; safe to call twice."""
        if self._tap is not None and self._descriptor >= 0:
            self._tap.end()
        self._stop()

    def _open_file(self) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._path, flags, 0o600)  # prompts may be in it
        except OSError as error:
            raise SettingsError(f"--record {self._path}: cannot be written: {error}") from error
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)

    def _write(self, line: bytes) -> None:
        if self._descriptor < 0:
            return
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            logger.warning("--record %s: ends here, it cannot be written: %s", self._path, error)
            self._stop()

    def _stop(self) -> None:
        self._descriptor = -1
        if self._finalizer is not None:
            self._finalizer()


def make_header(
    settings: Settings, engine: StepEngine, backends: dict[str, str], *, has_prompts: bool
) -> Header:
    """Describe a recording that begins."""
    limits = engine.limits
    return Header(
        format=TRACE_FORMAT,
        version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=_plain_settings(settings),
        limits=plain_limits(limits),
        backends={**engine.backends, **backends},
        block_size=limits.page_size,
        has_prompts=has_prompts,
    )


def plain_limits(limits: EngineLimits) -> Limits:
    """Return an engine's sizes as a trace has them."""
    return Limits(
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_running_reqs=limits.max_running_reqs,
        max_seq_len=limits.max_seq_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=sorted(limits.eos_token_ids),
    )


def _plain_settings(settings: Settings) -> dict[str, Any]:  # Any: settings of every type
    """Return the core's settings, and what was given to plugins; nothing of the server's."""
    plain: dict[str, Any] = {}  # Any: as above
    for section in CORE_SECTIONS:
        if section is not RecordSettings:
            plain |= settings.section(section).model_dump(mode="json")
    for path, value in settings.given.items():
        if "." in path:
            plain[path] = value if isinstance(value, bool | int | float | str) else str(value)
    model = Path(plain["model"]).expanduser()
    if model.exists():
        plain["model"] = str(model.resolve())
    return plain
