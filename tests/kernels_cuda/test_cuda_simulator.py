"""The simulator shows barriers that are missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl_kernels_cuda.units import Unit
from tests.cuda_sim.simulator import SimulatedLoader

# Each thread reads a slot that another one has filled, and then fills its own again, with zeros.
KERNEL = """
#include "device.cuh"
extern "C" __global__ void shift(u32* out) {{
    SHARED_BUFFER(slots);
    slots[threadIdx.x].x = 1 + threadIdx.x;
    {before}
    out[threadIdx.x] = slots[threadIdx.x ^ {apart}].x;
    {after}
    __shfl_sync(FULL_WARP, 0, 0);  // waits for the other lanes, and for no other warp
    copy_async(slots + threadIdx.x, nullptr, false);
}}
"""
NUM_THREADS = 128

Outcomes = Callable[..., set[bool]]


@pytest.fixture
def outcomes(tmp_path: Path) -> Outcomes:
    """Runs the kernel in both orders of threads; returns which of right and wrong came out."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")

    def run(before: str, after: str, *, apart: int) -> set[bool]:
        source = KERNEL.format(before=before, after=after, apart=apart)
        (tmp_path / "shift.cu").write_text(source)
        loader = SimulatedLoader(tmp_path)
        launch = loader.load(Unit("shift", {"shift": "P"}), torch.float32)["shift"]
        expected = 1 + (torch.arange(NUM_THREADS, dtype=torch.int32) ^ apart)
        found = set()
        for _ in range(2):
            out = torch.zeros(NUM_THREADS, dtype=torch.int32)
            launch((1, 1), (NUM_THREADS, 1), out.data_ptr())
            found.add(torch.equal(out, expected))
        return found

    return run


def test_with_both_barriers_every_order_gives_the_same(outcomes: Outcomes) -> None:
    assert outcomes("__syncthreads();", "__syncthreads();", apart=32) == {True}


def test_a_slot_that_is_read_too_early_shows(outcomes: Outcomes) -> None:
    assert False in outcomes("", "__syncthreads();", apart=32)


def test_a_slot_that_is_filled_again_too_early_shows(outcomes: Outcomes) -> None:
    assert False in outcomes("__syncthreads();", "", apart=32)


def test_lanes_that_exchange_something_need_no_barrier_of_the_block(outcomes: Outcomes) -> None:
    assert outcomes("__syncwarp();", "", apart=1) == {True}
