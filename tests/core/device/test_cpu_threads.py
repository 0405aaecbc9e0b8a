"""Ranks share the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from minisgl.device import set_cpu_threads


@pytest.fixture(autouse=True)
def _threads_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


def test_ranks_divide_the_cores_among_them() -> None:
    whole = set_cpu_threads(1)
    assert 1 <= whole <= (os.cpu_count() or 1)
    assert set_cpu_threads(2) == max(1, whole // 2)
    assert set_cpu_threads(10_000) == 1


def test_the_users_own_number_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert set_cpu_threads(2) == before
