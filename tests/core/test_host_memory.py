"""Host memory that goes back to the system, and is taken only as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.device import empty_parameter, map_zeros

CPU = torch.device("cpu")
STATUS = Path("/proc/self/statm")
MEGABYTE = 1 << 20


def resident_bytes() -> int:
    return int(STATUS.read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (7, 5), (1024, 2048)])
def test_a_parameter_has_its_shape_and_can_be_written(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parameter = empty_parameter(shape, dtype, CPU)
    assert (tuple(parameter.shape), parameter.dtype) == (shape, dtype)
    assert parameter.is_contiguous()
    assert torch.equal(parameter.fill_(2.0), torch.full(shape, 2.0, dtype=dtype))


def test_mapped_memory_is_zero() -> None:
    zeros = map_zeros(3 * MEGABYTE + 1)
    assert zeros.shape == (3 * MEGABYTE + 1,)
    assert not zeros.any()


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_mapped_memory_is_taken_as_it_is_written_and_given_back() -> None:
    before = resident_bytes()
    zeros = map_zeros(256 * MEGABYTE)
    zeros[:: 64 * MEGABYTE] = 1
    assert resident_bytes() - before < 64 * MEGABYTE
    zeros.fill_(1)
    assert resident_bytes() - before > 192 * MEGABYTE
    del zeros
    assert resident_bytes() - before < 64 * MEGABYTE
