"""Calls that run in another thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from textwrap import dedent

import pytest

from minisgl.errors import IntegrityError, WorkerError
from minisgl.parallel.driver import Driver, DriverLock


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.stop()


def test_a_call_returns_what_the_thread_made(driver: Driver) -> None:
    assert driver.call(threading.get_ident) != threading.get_ident()


def test_an_error_is_raised_where_it_was_asked_for(driver: Driver) -> None:
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        driver.call(work)
    assert driver.call(lambda: 3) == 3


def test_a_failure_frees_a_caller_that_waits_for_ever(driver: Driver) -> None:
    stuck = threading.Event()
    threading.Timer(0.05, driver.fail, [IntegrityError("the ranks differ")]).start()
    with pytest.raises(IntegrityError, match="the ranks differ"):
        driver.call(stuck.wait)
    with pytest.raises(WorkerError, match="the ranks differ"):
        driver.call(lambda: 3)
    stuck.set()


def test_a_call_that_takes_too_long_goes_on_without_its_caller(driver: Driver) -> None:
    done, may_end = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait()
        done.set()

    with pytest.raises(TimeoutError):
        driver.call(work, timeout_s=0.01)
    may_end.set()
    assert done.wait(5)


def test_a_call_within_a_call_is_not_waited_for(driver: Driver) -> None:
    assert driver.call(lambda: driver.call(lambda: 3), timeout_s=5) == 3


def test_whoever_holds_the_lock_lends_it_to_the_driver(driver: Driver) -> None:
    lock = DriverLock(driver)

    def work() -> int:
        with lock, lock:
            return 3

    with lock, lock:
        assert driver.call(work, timeout_s=5) == 3


def test_the_lock_keeps_other_threads_out(driver: Driver) -> None:
    lock, is_in = DriverLock(driver), threading.Event()

    def enter() -> None:
        with lock:
            is_in.set()

    with lock:
        other = threading.Thread(target=enter)
        other.start()
        assert not is_in.wait(0.05)
    other.join(5)
    assert is_in.is_set()


def test_a_stop_waits_for_what_the_thread_is_doing_but_not_for_ever() -> None:
    driver, may_end, done = Driver(), threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait()
        done.set()

    driver.post(work)
    driver.stop(timeout_s=0.05)
    assert not done.is_set()
    may_end.set()
    driver.stop(timeout_s=60)
    assert done.is_set()


def run_to_its_end(work: str) -> subprocess.CompletedProcess[str]:
    """Run a process that ends while its driver has begun to do ``work``."""
    script = f"""
    import logging, os, signal, threading, time, torch
    from minisgl.parallel.driver import Driver

    begun = threading.Event()

    def compute(seconds):
        begun.set()
        end, some = time.monotonic() + seconds, torch.ones(300, 300)
        while time.monotonic() < end:
            some @ some
        print("done")

    class Interrupt(logging.Handler):
        def emit(self, record):
            print("interrupted" if "is still at work" in record.getMessage() else record)
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt_when_told():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger("minisgl").addHandler(Interrupt())

    {work}
    begun.wait()
    """
    return subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("stop", ["", "; driver.stop(0.1)"])
def test_a_process_ends_in_order_while_its_thread_computes(stop: str) -> None:
    ended = run_to_its_end(f"driver = Driver(); driver.post(lambda: compute(1.0)){stop}")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_an_interrupt_ends_a_process_whose_thread_does_not_come_to_an_end() -> None:
    ended = run_to_its_end("interrupt_when_told(); Driver().post(lambda: compute(1e9))")
    assert (ended.returncode, ended.stdout) == (1, "interrupted\n"), ended.stderr
