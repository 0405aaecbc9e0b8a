"""The header that the units share: vectors, reductions, the exponential."""

from __future__ import annotations

import ctypes

import pytest
import torch

from minisgl.native.library import load_unit, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="needs a C++ compiler")


def exp(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
    load_unit("probe").probe_exp(*pointers, ctypes.c_int64(len(x)))
    return y


@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 1000])
def test_the_exponential_is_exact_to_two_units(size: int) -> None:
    x = torch.linspace(-87, 88, size)
    expected = x.double().exp()
    assert float(((exp(x) - expected) / expected).abs().max()) < 2 * 2**-23


def test_the_exponential_of_very_small_numbers_is_zero() -> None:
    x = torch.tensor([-87.5, -1000.0, float("-inf")])
    assert exp(x).tolist() == [0.0, 0.0, 0.0]


def test_the_exponential_of_zero_is_one() -> None:
    assert exp(torch.zeros(5)).tolist() == [1.0] * 5
