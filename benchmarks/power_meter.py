"""What a GPU draws and at what clock it runs, as nvidia-smi tells beside the work."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from statistics import fmean
from typing import NamedTuple, Self

import torch

_PERIOD_MS = 20
_KEPT = 10_000  # samples


class Reading(NamedTuple):
    """Means over a while."""

    watts: float
    mhz: float


class PowerMeter:
    """Samples the current device, as a context manager."""

    def __init__(self) -> None:
        """Start nvidia-smi.

        Raises:
            FileNotFoundError: It is not installed.
        """
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        command = ["nvidia-smi", "-i", f"GPU-{device.uuid}", "-lms", str(_PERIOD_MS)]
        query = ["--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen([*command, *query], stdout=subprocess.PIPE, text=True)
        self._samples: deque[tuple[float, Reading]] = deque(maxlen=_KEPT)
        threading.Thread(target=self._read, daemon=True).start()

    def between(self, started: float, ended: float) -> Reading:
        """Return the means of a while, by `time.perf_counter`; of the last sample if it has none.

        Raises:
            RuntimeError: nvidia-smi has told nothing yet.
        """
        samples = list(self._samples)
        if not samples:
            raise RuntimeError("nvidia-smi has told nothing yet; ask for more --seconds")
        found = [reading for at, reading in samples if started <= at <= ended] or [samples[-1][1]]
        return Reading(fmean(each.watts for each in found), fmean(each.mhz for each in found))

    def __enter__(self) -> Self:
        """It has begun already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._process.terminate()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            watts, mhz = line.split(",")
            self._samples.append((time.perf_counter(), Reading(float(watts), float(mhz))))
