from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.errors import ModelError
from minisgl.weights.safetensors_reader import SafetensorsReader

INDEX = "model.safetensors.index.json"


def save_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    """Write files and the index that lists them."""
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    shards = {
        "model-00001-of-00002.safetensors": {"a": torch.arange(12.0).reshape(3, 4)},
        "model-00002-of-00002.safetensors": {"b": torch.arange(6.0), "c": torch.ones(2, 2, 2)},
    }
    save_shards(tmp_path, shards)
    return tmp_path


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8,
     torch.uint8, torch.bool, torch.float8_e4m3fn],
)  # fmt: skip
def test_a_tensor_of_any_dtype_is_read_as_it_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.arange(12) % 2).reshape(3, 4).to(dtype)
    save_file({"x": tensor, "scalar": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    found = reader.read("x", (slice(None), slice(None)))
    assert found.dtype == dtype
    assert found.tolist() == tensor.tolist()
    assert reader.read("scalar", ()).item() == 3.0


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None), slice(None)),
        (slice(1, 3), slice(None), slice(2, 5)),
        (slice(2, 2), slice(None), slice(None)),
        (slice(0, 4, 2), slice(1, None), slice(None)),
        (slice(-2, None), slice(None), slice(None)),
    ],
)
def test_a_part_is_what_slicing_the_whole_gives(tmp_path: Path, index: tuple[slice, ...]) -> None:
    tensor = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    assert torch.equal(SafetensorsReader(tmp_path).read("x", index), tensor[index])


def test_names_come_in_storage_order_over_all_shards(sharded: Path) -> None:
    reader = SafetensorsReader(sharded)
    assert sorted(reader.names()) == ["a", "b", "c"]
    assert reader.shape("a") == (3, 4)
    assert reader.where("c").endswith("model-00002-of-00002.safetensors")
    assert reader.where() == str(sharded)


def test_files_and_tensors_that_the_index_does_not_list_do_not_count(sharded: Path) -> None:
    save_file({"a": torch.zeros(1), "old": torch.zeros(1)}, sharded / "model.safetensors")
    save_file(
        {"a": torch.zeros(3, 4), "b": torch.arange(6.0), "c": torch.ones(2, 2, 2)},
        sharded / "model-00002-of-00002.safetensors",
    )
    reader = SafetensorsReader(sharded)
    assert sorted(reader.names()) == ["a", "b", "c"]
    assert reader.read("a", (slice(None), slice(None))).sum() == 66


def test_a_duplicate_without_an_index_is_an_error_that_names_both_files(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ModelError, match=r"two\.safetensors: tensor a is also in one\.safetensors"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("number", [1, 2])
def test_a_truncated_shard_is_an_error_that_names_file_and_tensor(
    sharded: Path, number: int
) -> None:
    path = sharded / f"model-0000{number}-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=rf"{path.name}: truncated: tensor [ac] ends at byte"):
        SafetensorsReader(sharded)


def test_a_shard_cut_at_any_byte_is_an_error_of_ours(sharded: Path) -> None:
    path = sharded / "model-00001-of-00002.safetensors"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ModelError, match=path.name):
            SafetensorsReader(sharded)


def test_a_shard_cut_after_opening_is_an_error_that_names_the_tensor(sharded: Path) -> None:
    reader = SafetensorsReader(sharded)
    path = sharded / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=rf"{path.name}: truncated in tensor a"):
        reader.read("a", (slice(None), slice(None)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "Git LFS pointer"),
        (b"<html>not found</html>", "is truncated or not safetensors"),
        ((2).to_bytes(8, "little") + b"{]", "its header is not JSON"),
        ((14).to_bytes(8, "little") + b'{"a":{"x":12}}', "entry of tensor a is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not a table"),
    ],
)
def test_what_is_no_weight_file_is_refused_with_a_reason(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{message}"):
        SafetensorsReader(tmp_path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="1 of 2 weight files are missing: model-00002-of-00002"):
        SafetensorsReader(sharded)


def test_a_tensor_that_the_index_promises_in_vain_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"00001-of-00002\.safetensors: holds no tensor ghost"):
        SafetensorsReader(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: "):
        SafetensorsReader(sharded)


def test_an_index_cannot_lead_out_of_the_folder(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ModelError, match="tensor a is said to be in '../secret.safetensors'"):
        SafetensorsReader(sharded)


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(1024, 2048)),
        (slice(1, 5), slice(0, 600)),
        (slice(0, 6, 2), slice(1024, 2048)),
        (slice(None), slice(0, 2048, 2)),
    ],
)
def test_columns_of_long_rows_are_what_slicing_gives(
    tmp_path: Path, index: tuple[slice, ...]
) -> None:
    wide = torch.randn(6, 2048, generator=torch.Generator().manual_seed(0))
    deep = torch.randn(6, 3, 2048, generator=torch.Generator().manual_seed(1))
    save_file({"wide": wide, "deep": deep}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert torch.equal(reader.read("wide", index), wide[index])
    deep_index = (index[0], slice(None), index[1])
    assert torch.equal(reader.read("deep", deep_index), deep[deep_index])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux does")
def test_a_quarter_of_the_columns_is_a_quarter_of_the_reading(tmp_path: Path) -> None:
    save_file({"x": torch.ones(500, 4096)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    part = reader.read("x", (slice(None), slice(1024, 2048)))
    assert part.shape == (500, 1024)
    assert bytes_read() - before < 1.1 * part.nbytes
