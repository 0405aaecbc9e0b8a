"""A private folder for socket files, that leaves nothing behind."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from minisgl.errors import SettingsError

logger = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107  # sockaddr_un holds 108, the closing zero included
_LONGEST_NAME = "/scheduler.ipc.sock"
_LOCK = "lock"


class SocketFolder:
    """A folder of mode 0700 that exists as long as its owner; stale ones go at the next start.

    A lock file inside is held by the owner and tells a folder in use from one whose owner was
    killed.
    """

    def __init__(self) -> None:
        """Make the folder where the path is short enough for a socket.

        Raises:
            SettingsError: No place for temporary files can be written to.
        """
        for base in _bases():
            try:
                _remove_stale(base)
                self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
                self._lock = _take_lock(self.path / _LOCK)
                return
            except OSError as error:
                logger.debug("no socket folder in %s: %s", base, error)
        raise SettingsError(
            "TMPDIR: no folder for socket files can be made in it, nor in /tmp, /var/tmp, /dev/shm"
        )

    def remove(self) -> None:
        """Remove folder and sockets; safe to call twice.

        Waits for a rank that is just about to open the rendezvous in it; see `kept_folder`.
        """
        descriptor = -1
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        shutil.rmtree(self.path, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> SocketFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def _prefix() -> str:
    return f"minisgl-{os.getuid()}-"


def _bases() -> Iterator[Path]:
    """Yield places for temporary files, the user's choice first, that leave room for a name."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        name = f"{base}/{_prefix()}12345678{_LONGEST_NAME}"
        if len(os.fsencode(name)) <= _MAX_PATH_BYTES and Path(base).is_dir():
            yield Path(base)


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.stat(path)  # between the two calls someone may have taken it for a stale one
    return descriptor


def _remove_stale(base: Path) -> None:
    """Remove folders of ours whose owner no longer lives."""
    for folder in base.glob(f"{_prefix()}*"):
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not one of ours, or its owner is just making it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
