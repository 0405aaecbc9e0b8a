"""What is handed to the driver, checked without one."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from minisgl.errors import PluginError
from minisgl_kernels_cuda.driver import argument_offsets
from minisgl_kernels_cuda.matrix_map import MatrixMapper
from minisgl_kernels_cuda.units import UNITS, HeadsShape, Unit


class FakeDriver:
    """Stands for ``libcuda``; writes what it was given where the map should be."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.where = 0

    def cuTensorMapEncodeTiled(
        self, to: ctypes.c_void_p, *args: Any
    ) -> int:  # arguments of many types
        self.where = int(to.value or 0)
        _, rank, address, shape, stride, box, steps, *_ = args
        given = (rank, address.value, *shape, *stride, *box, *steps)
        ctypes.memmove(self.where, struct.pack(f"{len(given)}q", *given), 8 * len(given))
        return self.status


def test_a_map_has_the_matrix_and_its_box() -> None:
    driver: Any = FakeDriver()  # stands for a library
    mapper = MatrixMapper(driver)
    first, second = mapper(0x7F00_0000_0000, 1000, 72, 128), mapper(16, 5, 8, 64)
    assert struct.unpack_from("9q", first) == (2, 0x7F00_0000_0000, 72, 1000, 144, 64, 128, 1, 1)
    assert struct.unpack_from("9q", second) == (2, 16, 8, 5, 16, 64, 64, 1, 1)
    assert len(first) == 128
    assert driver.where % 64 == 0


def test_a_map_of_heads_has_their_tokens_and_its_box() -> None:
    driver: Any = FakeDriver()  # stands for a library
    found = MatrixMapper(driver).heads(4096, HeadsShape(1000, 40, 128, 7168), (25, 5))
    shape, strides, box, steps = (128, 40, 1000), (256, 14336), (64, 5, 25), (1, 1, 1)
    assert struct.unpack_from("13q", found) == (3, 4096, *shape, *strides, *box, *steps)


def test_a_refused_matrix_is_named() -> None:
    driver: Any = FakeDriver(status=1)  # stands for a library
    mapper = MatrixMapper(driver)
    with pytest.raises(PluginError, match="5 x 8 elements at 0x10 .* driver error 1"):
        mapper(16, 5, 8, 64)
    with pytest.raises(PluginError, match="9 x 2 x 64 elements at 0x20 .* driver error 1"):
        mapper.heads(32, HeadsShape(9, 2, 64, 128), (64, 2))


def test_arguments_lie_as_struct_packs_them() -> None:
    assert argument_offsets("PiPqf") == [0, 8, 16, 24, 32]
    assert argument_offsets("128s128sPii") == [0, 128, 256, 264, 268]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_layout_has_an_offset_for_each_argument(unit: Unit) -> None:
    for layout in unit.entries.values():
        num = len(struct.unpack(layout, bytes(struct.calcsize(layout))))
        assert len(argument_offsets(layout)) == num
