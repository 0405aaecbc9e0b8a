"""What a rank finds that another one has left alone, in a process of its own."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue

import torch

from minisgl.distributed.contract import Communicator
from minisgl.errors import CommError
from minisgl.testing.comm_worker import RankTask, make_communicator

RAISED = "CommError"
"""What a rank reports of a call that has ended as it should."""

_UNTIL_DEATH_S = 0.5  # so that the other rank is in its call; one that is late must raise too


@dataclass(frozen=True, slots=True)
class LossTask:
    """What one of two ranks is told.

    Attributes:
        rank: Its part in the group.
        dying: The rank that is killed.
        calls: Names of the collectives that the other one calls: the first is in progress by then.
    """

    rank: RankTask
    dying: int
    calls: tuple[str, ...]


def run_until_alone(task: LossTask, answers: Queue[tuple[str, str]]) -> None:
    """Die, or lose the other rank and send how each call ends; the entry point of a process.

    What is sent is the name of a call, and `RAISED` or what it did instead.
    """
    try:
        comm = make_communicator(task.rank)
        comm.min_int(1)  # from here on the group has been of use
    except Exception:
        answers.put(("meeting", traceback.format_exc()))
        raise
    if task.rank.rank == task.dying:
        time.sleep(_UNTIL_DEATH_S)
        os.kill(os.getpid(), signal.SIGKILL)
    calls = _collectives(comm, task.rank.torch_device())
    for name in task.calls:
        answers.put((name, _end_of(calls[name], comm)))
    comm.shutdown()
    answers.put(("shutdown", ""))


def _collectives(comm: Communicator, device: torch.device) -> Mapping[str, Callable[[], object]]:
    numbers = torch.ones(4, 64, device=device)
    return {
        "all_reduce": lambda: comm.all_reduce(numbers.clone()),
        "all_gather": lambda: comm.all_gather(numbers),
        "min_int": lambda: comm.min_int(1),
        "broadcast_bytes": partial(comm.broadcast_bytes, None if comm.rank else b"news"),
    }


def _end_of(call: Callable[[], object], comm: Communicator) -> str:
    """Return how a collective ends."""
    try:
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was submitted ends too
        comm.raise_if_broken()
    except CommError:
        return RAISED
    except Exception:  # noqa: BLE001 - the test shows whatever it is
        return f"raised another error:\n{traceback.format_exc()}"
    return "returned as if nothing had happened"
