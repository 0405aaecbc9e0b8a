from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.errors import SettingsError
from minisgl_moe_triton.plan import LayerShape, Step, TileShape, default_steps
from minisgl_moe_triton.tables import (
    TunedShape,
    TuningTable,
    find_steps,
    package_table,
    read_table,
    user_table_path,
    write_table,
)

QWEN3 = LayerShape(128, 8, 2048, 768, "bfloat16")
OTHER = LayerShape(16, 2, 64, 32, "float32")
TILE = TileShape(block_n=32, block_k=64, num_warps=2)
STEPS = (Step(1 << 30, 16, TILE, TILE),)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 257])
@pytest.mark.parametrize("block_m", [16, 128])
def test_no_routing_needs_more_than_the_most_blocks(num_tokens: int, block_m: int) -> None:
    shape = LayerShape(8, 2, 64, 32, "float32")
    slots = num_tokens * shape.top_k
    # The worst routing: as many experts as can be with one row in a block of their own.
    alone = min(shape.num_experts - 1, slots - 1)
    worst = alone + -(-(slots - alone) // block_m)
    assert worst <= shape.max_blocks(num_tokens, block_m) <= worst + shape.num_experts


@pytest.mark.parametrize("sm", [None, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_default_tiles_rise_and_fit_shared_memory(sm: int | None, dtype: str) -> None:
    limit = {None: 1 << 30, 80: 163, 90: 227, 100: 227}.get(sm, 99) << 10
    shape = LayerShape(128, 8, 2048, 768, dtype)
    steps = default_steps(shape, sm)
    assert [step.max_tokens for step in steps] == sorted({step.max_tokens for step in steps})
    for step in steps[1:]:
        for tile, pair in ((step.gate_up, 2), (step.down, 1)):
            rows = step.block_m + pair * tile.block_n
            assert tile.num_stages * rows * tile.block_k * shape.itemsize <= limit


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = TuningTable("GPU", (TunedShape(QWEN3, STEPS),))
    write_table(tmp_path / "new" / "table.json", table)
    assert read_table(tmp_path / "new" / "table.json") == table


def test_a_shape_that_is_tuned_again_replaces_itself() -> None:
    table = TuningTable("GPU", (TunedShape(QWEN3, ()), TunedShape(OTHER, STEPS)))
    assert table.with_shape(TunedShape(QWEN3, STEPS)).find(QWEN3) == STEPS
    assert len(table.with_shape(TunedShape(QWEN3, STEPS)).shapes) == 2


def test_the_users_table_comes_before_the_packages() -> None:
    write_table(user_table_path("GPU X"), TuningTable("GPU X", (TunedShape(QWEN3, STEPS),)))
    assert find_steps(QWEN3, "GPU X", 90) == STEPS
    assert find_steps(QWEN3, "GPU Y", 90) == package_table(90).find(QWEN3)


def test_a_shape_without_a_table_gets_the_general_rule() -> None:
    assert find_steps(OTHER, "GPU", 90) == default_steps(OTHER, 90)


def test_a_table_that_was_named_but_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        find_steps(QWEN3, "GPU", 90, tmp_path / "none.json")


def test_older_gpus_do_not_get_tensor_descriptors() -> None:
    tile = TileShape(block_n=32, block_k=64, has_tma=True)
    steps = (Step(1 << 30, 16, tile, tile),)
    write_table(user_table_path("GPU"), TuningTable("GPU", (TunedShape(QWEN3, steps),)))
    for sm in (89, 90):
        step = find_steps(QWEN3, "GPU", sm)[0]
        assert [step.gate_up.has_tma, step.down.has_tma] == [sm == 90] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 24}, "24: must be a power of two"),
        ({"block_m": 8}, "must be 16 or more"),
        ({"block_m": 1}, "only with max_tokens 1"),
        ({"block_m": "wide"}, "valid integer"),
    ],
)
def test_a_damaged_table_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "table.json"
    write_table(path, TuningTable("GPU", (TunedShape(QWEN3, STEPS),)))
    document = json.loads(path.read_text())
    document["shapes"][0]["steps"][0] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(SettingsError, match=message):
        read_table(path)


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b"\xff{}")
    with pytest.raises(SettingsError, match=f"^tuning table {path}: is not UTF-8 text: "):
        read_table(path)


def test_the_packages_tables_are_sound() -> None:
    assert package_table(90).find(QWEN3)
    assert package_table(70).shapes == ()
