"""A thread that does one rank's work, so that whoever asked for it can stop waiting."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from minisgl.errors import WorkerError

logger = logging.getLogger(__name__)

_SILENT_S = 2.0  # of a process that waits for the thread at its exit
_EXIT_S = 60.0  # what takes longer than that does not end

_Result = TypeVar("_Result")
_Task = tuple[Callable[[], Any], "Future[Any]"]  # Any: results of every type


class Driver:
    """Runs calls one after another in a thread of its own.

    An interrupt of the caller, such as Ctrl-C, leaves no call half done: it goes on, and the next
    one waits for it. And when a call can never end, because it waits for a rank that is gone, its
    caller is told by `fail`.

    The interpreter is not torn down under the thread. If it were while the thread is in torch, the
    process would be aborted: Python before 3.14 unwinds the stack of a daemon thread that asks for
    its lock then, and torch asks for it in a destructor, which C++ lets nothing unwind.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()  # Any: as above
        self._failure = ""
        self._thread = threading.Thread(
            target=_run_tasks, args=(self._tasks,), name="minisgl rank 0", daemon=True
        )
        self._at_exit = partial(_end_with_process, self._tasks, self._thread)
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why there can be no more calls, or nothing."""
        return self._failure

    @property
    def is_current(self) -> bool:
        """Whether this is asked in the thread, by an observer or the garbage collector."""
        return threading.current_thread() is self._thread

    def call(self, work: Callable[[], _Result], timeout_s: float | None = None) -> _Result:
        """Run ``work`` in the thread, after what was asked for before, and return its result.

        Asked in the thread itself, it runs at once.

        Raises:
            WorkerError: `fail` was called before.
            TimeoutError: It did not end in time; it goes on all the same.
        """
        if self.is_current:
            return work()
        future: Future[Any] = Future()  # Any: as above
        with self._lock:
            if self._failure:
                raise WorkerError(self._failure)
            self._pending.add(future)
        self._tasks.put((work, future))
        try:
            result: _Result = future.result(timeout_s)
            return result
        finally:
            with self._lock:
                self._pending.discard(future)

    def post(self, work: Callable[[], None]) -> None:
        """Let ``work`` run in the thread after what was asked for before, also after `fail`.

        Nobody hears of its errors.
        """
        self._tasks.put((work, Future()))

    def fail(self, error: Exception) -> None:
        """Let calls that are being waited for raise ``error``, and later ones `WorkerError`."""
        with self._lock:
            self._failure = self._failure or str(error) or type(error).__name__
            for future in self._pending:
                _settle(future, None, error)

    def stop(self, timeout_s: float = 0.0) -> None:
        """Let the thread end after what it was asked to do, and wait for that for a while.

        What is still being done then is waited for again when the process exits.
        """
        self._tasks.put(None)
        if not self.is_current:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            atexit.unregister(self._at_exit)


class DriverLock:
    """A reentrant lock whose holder lends it to a driver, for as long as it waits for it."""

    def __init__(self, driver: Driver) -> None:
        """Make it free."""
        self._driver = driver
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._driver.is_current:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        if not self._driver.is_current:
            self._lock.release()


def _run_tasks(tasks: SimpleQueue[_Task | None]) -> None:
    """Run tasks until there is ``None``."""
    while (task := tasks.get()) is not None:
        work, future = task
        try:
            _settle(future, work(), None)
        except BaseException as error:  # noqa: BLE001
            # Not swallowed: it is the caller who raises it.
            _settle(future, None, error)
        del task, work, future  # they hold on to what the caller may want to let go of


def _end_with_process(tasks: SimpleQueue[_Task | None], thread: threading.Thread) -> None:
    """Wait for the thread before the interpreter is torn down, or else end the process here."""
    tasks.put(None)
    with suppress(KeyboardInterrupt):
        thread.join(_SILENT_S)
        if thread.is_alive():
            logger.warning(
                "%s is still at work; the process waits for it, up to %.0f s or until Ctrl-C",
                thread.name,
                _EXIT_S,
            )
            thread.join(_EXIT_S)
    if thread.is_alive():
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(1)


def _settle(future: Future[Any], result: Any, error: BaseException | None) -> None:  # Any: as above
    """Give a future its result unless it has one."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
