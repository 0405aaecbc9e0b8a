from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from minisgl.errors import ModelError
from minisgl.weights.gguf_file import GGUFFile


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint64("test.count", 2**40)
    writer.add_array("test.words", ["", "é", "three words here"])
    writer.add_array("test.numbers", [1.5, -2.0])
    writer.add_array("test.flags", [True, False])
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    first = np.arange(12, dtype=np.float32).reshape(3, 4)
    return write_file(tmp_path / "small.gguf", {"first": first, "last": first + 100})


def test_metadata_and_table_are_those_that_the_gguf_package_reads(small: Path) -> None:
    reader, file = gguf.GGUFReader(small), GGUFFile(small)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert file.metadata == {key: reader.fields[key].contents() for key in keys}
    assert {name: (t.shape, t.offset) for name, t in file.tensors.items()} == {
        t.name: (tuple(reversed(t.shape.tolist())), t.data_offset) for t in reader.tensors
    }


def test_rows_are_read_as_they_are_stored(small: Path) -> None:
    rows = GGUFFile(small).read_rows("last", 1, 3).view(np.float32)
    assert rows.tolist() == [[104.0, 105.0, 106.0, 107.0], [108.0, 109.0, 110.0, 111.0]]


@pytest.mark.parametrize("cut", [1, 48])
def test_a_truncated_file_is_an_error_that_names_file_and_tensor(small: Path, cut: int) -> None:
    small.write_bytes(small.read_bytes().rstrip(b"\0")[:-cut])
    with pytest.raises(ModelError, match=r"small\.gguf: truncated: tensor last ends at byte"):
        GGUFFile(small)


def test_a_file_cut_at_any_byte_is_an_error_of_ours(small: Path) -> None:
    content = small.read_bytes()
    for size in range(0, len(content) - 64, 7):
        small.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"small\.gguf"):
            GGUFFile(small)


def test_a_file_cut_after_it_was_opened_is_an_error_that_names_the_tensor(small: Path) -> None:
    file = GGUFFile(small)
    small.write_bytes(small.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"small\.gguf: truncated in tensor last"):
        file.read_rows("last", 0, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(40), "not GGUF"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "GGUF version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), r"big-endian\); little-endian 2 and 3"),
    ],
)
def test_what_is_no_gguf_file_is_refused_with_a_reason(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)


def test_any_part_of_a_split_model_opens_all_of_it(tmp_path: Path) -> None:
    one = np.ones((1, 4), np.float32)
    write_file(tmp_path / "m-00001-of-00002.gguf", {"a": one})
    second = write_file(tmp_path / "m-00002-of-00002.gguf", {"b": 2 * one})
    file = GGUFFile(second)
    assert file.path.name == "m-00001-of-00002.gguf"
    assert list(file.tensors) == ["a", "b"]
    assert file.read_rows("b", 0, 1).view(np.float32).tolist() == [[2.0] * 4]


def test_a_missing_part_of_a_split_model_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m-00001-of-00003.gguf", {"a": np.ones((1, 4), np.float32)})
    with pytest.raises(ModelError, match=r"2 of 3 parts missing, such as m-00002-of-00003\.gguf"):
        GGUFFile(path)


def test_a_tensor_in_two_parts_is_an_error(tmp_path: Path) -> None:
    for part in (1, 2):
        path = tmp_path / f"m-0000{part}-of-00002.gguf"
        write_file(path, {"a": np.ones((1, 4), np.float32)})
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf: tensor a is stored twice"):
        GGUFFile(path)
