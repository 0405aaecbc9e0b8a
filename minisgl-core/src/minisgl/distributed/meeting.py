"""Where ranks meet: at a file on one machine, or at a port of the first of several."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minisgl.distributed.contract import CommConfig
from minisgl.errors import CommError

# Any: as in `minisgl.distributed.control`.
_torch: Any = dist

_POLL_S = 0.02
_STORE_TIMEOUT = timedelta(seconds=2)
_CALLED_OFF = "called off"
_TCP = "tcp://"
_FILE = "file://"


def meet(config: CommConfig) -> Any:  # Any: as above
    """Wait until every rank has come to the rendezvous, and return its key-value store.

    Raises:
        CommError: Some did not come in time, or the meeting was called off.
    """
    deadline = time.monotonic() + config.timeout_s
    timeout = timedelta(seconds=config.timeout_s)
    store = _open_store(config, timeout)
    try:
        # A file that has been removed would be waited for as long as for a rank.
        store.set_timeout(min(timeout, _STORE_TIMEOUT))
        store.set(f"rank {config.rank}", "here")
        missing = list(range(config.size))
        while True:
            missing = [rank for rank in missing if not store.check([f"rank {rank}"])]
            if not missing:
                store.set_timeout(timeout)
                return store
            if store.check([_CALLED_OFF]):
                raise CommError(f"the ranks do not meet: {store.get(_CALLED_OFF).decode()}")
            if time.monotonic() > deadline:
                raise CommError(
                    f"--distributed-timeout-s {config.timeout_s:g}: rank {config.rank} waited for "
                    f"ranks that did not come: {', '.join(map(str, missing))}"
                )
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise CommError(f"another rank is gone or late: {error}") from error


def call_off_meeting(init_method: str, reason: str) -> None:
    """Let ranks that wait at a rendezvous, or are yet to come, give up.

    For whoever knows that one of them will not come. Does nothing where the meeting is over, or
    has not begun.
    """
    try:
        if init_method.startswith(_TCP):
            host, port = split_address(init_method)
            store = _torch.TCPStore(host, port, None, False, _STORE_TIMEOUT, wait_for_workers=False)
        else:
            store = _file_store(init_method, -1)
        store.set(_CALLED_OFF, reason)
    except (CommError, RuntimeError):
        return


def split_address(init_method: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``."""
    host, _, port = init_method.removeprefix(_TCP).rpartition(":")
    return host.strip("[]"), int(port)


def own_address(init_method: str) -> str:
    """Return the address under which the other ranks reach this one.

    On one machine that is the loopback, which a host whose own name does not resolve has as well.
    Between machines it is the one from which this one reaches the first.

    Raises:
        CommError: The first machine's name does not resolve, or there is no way to it.
    """
    if not init_method.startswith(_TCP):
        return "127.0.0.1"
    host, port = split_address(init_method)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommError(f"--master {host}:{port}: cannot be reached: {error}") from error


@contextmanager
def kept_folder(folder: Path) -> Iterator[None]:
    """Keep the folder of a rendezvous; whoever wants to remove it waits for its exclusive lock.

    Raises:
        CommError: It is gone.
    """
    gone = f"the ranks do not meet: {folder} is gone"
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CommError(gone) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not folder.exists():  # it was being removed
            raise CommError(gone)
        yield
    finally:
        os.close(descriptor)


def _file_store(place: str, size: int) -> Any:  # Any: as above
    """Open the store at a file.

    Without its folder torch would try again for minutes, and hold up the whole process.
    """
    path = Path(place.removeprefix(_FILE))
    with kept_folder(path.parent):
        return _torch.FileStore(str(path), size)


def _open_store(config: CommConfig, timeout: timedelta) -> Any:  # Any: as above
    """Open the store; rank 0 makes the one at a port, and the others wait for it."""
    place = config.init_method
    if not place.startswith(_TCP):
        return _file_store(place, config.size)
    host, port = split_address(place)
    is_first = config.rank == 0
    own_address(place)  # a name that does not resolve would be tried until the time is up
    try:
        return _torch.TCPStore(
            host, port, config.size, is_first, timeout, wait_for_workers=False, multi_tenant=False
        )
    except RuntimeError as error:
        what = "cannot listen there" if is_first else "node 0 is not there"
        raise CommError(f"--master {host}:{port}: {what}: {error}") from error
