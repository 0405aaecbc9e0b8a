"""Layouts of decode attention: which ends count, and what fits a device."""

from __future__ import annotations

import pytest

from minisgl.errors import PluginError
from minisgl_kernels_cuda.attention_plan import (
    GROUP,
    QUEUE_DEPTH,
    TILE_KEYS,
    AttentionPlan,
    choose_plan,
    fit_plan,
)
from minisgl_kernels_cuda.units import DeviceSize, read_sources

H200 = DeviceSize(132, 227 << 10, "sm_90a")
BF16_KEY, F32_KEY = 256, 512  # bytes of a head dimension of 128


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("attention.cu", "DEPTH", QUEUE_DEPTH), ("attention_tile.cuh", "KEYS", TILE_KEYS),
        ("attention_tile.cuh", "GROUP", GROUP),
    ],
)  # fmt: skip
def test_plans_count_with_the_sizes_of_the_kernel(file: str, name: str, value: int) -> None:
    assert f"constexpr int {name} = {value};" in read_sources()[file]


def test_ends_count_only_where_blocks_have_many_chunks() -> None:
    assert not choose_plan(8, num_sms=132).has_ends
    assert choose_plan(2048, num_sms=132).has_ends


@pytest.mark.parametrize("num_pairs", [8, 256, 512, 2048])
def test_a_chosen_plan_fits_an_h200_as_it_is(num_pairs: int) -> None:
    plan = choose_plan(num_pairs, H200.num_sms)
    assert fit_plan(plan, 256, BF16_KEY, H200) == plan


def test_blocks_of_eight_warps_give_way_to_four_where_keys_are_too_wide() -> None:
    assert fit_plan(AttentionPlan(8, 1), 1, F32_KEY, H200) == AttentionPlan(4, 1)


def test_a_multiprocessor_has_as_many_blocks_as_there_is_room_for() -> None:
    plan = fit_plan(AttentionPlan(4, 3, has_ends=True), 256, F32_KEY, H200)
    assert plan == AttentionPlan(4, 1, has_ends=True)


def test_a_device_without_room_for_any_plan_is_refused() -> None:
    small = DeviceSize(132, 48 << 10, "sm_90a")
    with pytest.raises(PluginError, match=r"need 68592 bytes of shared memory, .* has 50176$"):
        fit_plan(AttentionPlan(8, 1), 84, BF16_KEY, small)
