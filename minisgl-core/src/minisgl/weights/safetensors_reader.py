"""Weights in safetensors files, one or many.

The files are read with plain reads, not mapped: only the wanted bytes enter memory, none of the
file counts as ours, and a file that is cut short is an error instead of a bus error. With an
index, the index decides which file each tensor is taken from; nothing else in the folder counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl.errors import ModelError
from minisgl.weights.byte_ranges import ByteRanges
from minisgl.weights.contract import WeightReader

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_MIN_PIECE_BYTES = 2048  # below it a call costs more than the bytes that it saves
_LFS_START = b"version https://git-lfs"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # first byte in the file


class SafetensorsReader(WeightReader):
    """Reads tensors from the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Find the files and read their headers.

        Args:
            folder: With ``model.safetensors.index.json``, or ``model.safetensors``, or any number
                of other safetensors files without an index.

        Raises:
            ModelError: A file is missing, truncated, empty, a pointer or not safetensors, a tensor
                of the index is not where it should be, or one is stored twice.
        """
        self._folder = folder
        self._ranges = ByteRanges()
        self._entries: dict[str, _Entry] = {}
        index = read_index(folder)
        for path in find_shards(folder, index):
            for name, entry in _read_header(path).items():
                if index is not None and index.get(name) != path.name:
                    continue  # not on the list, or on it for another file
                if name in self._entries:
                    raise ModelError(
                        f"{path}: tensor {name} is also in {self._entries[name].path.name}, and "
                        "there is no index that says which one counts"
                    )
                self._entries[name] = entry
        for name, file_name in (index or {}).items():
            if name not in self._entries:
                raise ModelError(
                    f"{folder / file_name}: holds no tensor {name}, which {INDEX_NAME} promises"
                )

    def names(self) -> Iterator[str]:
        """Yield the names, file by file, in storage order."""
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._entries[name].shape

    def where(self, name: str | None = None) -> str:
        """Return the file that holds a tensor, or the folder."""
        entry = self._entries.get(name) if name is not None else None
        return str(entry.path if entry else self._folder)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Read a part; from disk only the wanted rows, and of long rows only the wanted columns."""
        entry = self._entries[name]
        if not entry.shape:
            return self._read(name, entry, 0, 1).reshape(())
        first, last, step = index[0].indices(entry.shape[0])
        last = max(first, last)
        if step == 1 and _is_worth_cutting(entry, index):
            return self._read_columns(name, entry, (first, last), index[-1])
        rows = self._read(name, entry, first, last)
        return rows[(slice(None, None, step), *index[1:])]

    def close(self) -> None:
        """Close the files."""
        self._ranges.close()

    def _read(self, name: str, entry: _Entry, first: int, last: int) -> torch.Tensor:
        """Read the rows ``first`` to ``last`` (exclusive) of the first dimension."""
        row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        size = (last - first) * row_bytes
        raw = self._ranges.read(entry.path, entry.offset + first * row_bytes, size)
        if raw.size != size:
            raise ModelError(f"{entry.path}: truncated in tensor {name}")
        if size == 0:
            return torch.empty((last - first, *entry.shape[1:]), dtype=entry.dtype)
        return torch.from_numpy(raw).view(entry.dtype).reshape(last - first, *entry.shape[1:])

    def _read_columns(
        self, name: str, entry: _Entry, rows: tuple[int, int], columns: slice
    ) -> torch.Tensor:
        """Read a range of the last dimension, for a range of the first and all between."""
        start, stop, _ = columns.indices(entry.shape[-1])
        middle, item_bytes = entry.shape[1:-1], entry.dtype.itemsize
        stride = entry.shape[-1] * item_bytes
        num_skipped, num_pieces = (n * math.prod(middle) for n in (rows[0], rows[1] - rows[0]))
        piece_bytes = (stop - start) * item_bytes
        offset = entry.offset + num_skipped * stride + start * item_bytes
        raw = self._ranges.read_pieces(entry.path, offset, (num_pieces, piece_bytes), stride)
        if raw.size != num_pieces * piece_bytes:
            raise ModelError(f"{entry.path}: truncated in tensor {name}")
        shape = (rows[1] - rows[0], *middle, stop - start)
        return torch.from_numpy(raw).view(entry.dtype).reshape(shape)


def _is_worth_cutting(entry: _Entry, index: tuple[slice, ...]) -> bool:
    """Whether one read per row, of a part of it, is better than one read of all rows."""
    if len(entry.shape) < 2 or len(index) != len(entry.shape):
        return False
    whole = [s.indices(n) == (0, n, 1) for s, n in zip(index, entry.shape, strict=True)]
    start, stop, step = index[-1].indices(entry.shape[-1])
    piece_bytes = (stop - start) * entry.dtype.itemsize
    return all(whole[1:-1]) and not whole[-1] and step == 1 and piece_bytes >= _MIN_PIECE_BYTES


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file name of each tensor, or ``None`` where the folder has no index.

    Raises:
        ModelError: The index is damaged, or names a file outside the folder.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: is damaged: {error!r}") from error
    if not isinstance(index, dict) or not index:
        raise ModelError(f"{path}: its weight_map lists no tensors")
    for name, file_name in index.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"{path}: tensor {name} is said to be in {file_name!r}, not a name")
    return index


def find_shards(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    """Return the files that count, each once.

    Raises:
        ModelError: One of them is missing, or there is none.
    """
    if index is not None:
        paths = [folder / name for name in dict.fromkeys(index.values())]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(paths)} weight files are missing: "
                f"{', '.join(missing[:3])}"
            )
        return sorted(paths)
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    paths = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if not paths:
        raise ModelError(f"{folder}: holds no {SINGLE_NAME} and no {INDEX_NAME}")
    return paths


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read the table of one file and check that the file is as long as the table says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_START))
        if start == _LFS_START:
            raise ModelError(f"{path}: is a Git LFS pointer, not the weights; run git lfs pull")
        if size < 8:
            raise ModelError(f"{path}: has {size} bytes, so it holds no weights; download it again")
        length = int.from_bytes(start[:8], "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path}: is truncated or not safetensors: header of {length} bytes")
        file.seek(8)
        raw = file.read(length)
    try:
        table = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ModelError(f"{path}: its header is not a table of tensors")
    table.pop("__metadata__", None)
    data_start = 8 + length
    entries = {name: _entry(path, name, fields, data_start, size) for name, fields in table.items()}
    return dict(sorted(entries.items(), key=lambda item: item[1].offset))


def _entry(path: Path, name: str, fields: Any, data_start: int, size: int) -> _Entry:
    """Check one entry of the table. ``fields`` is JSON of any shape until checked."""
    try:
        dtype_name, shape = fields["dtype"], tuple(int(n) for n in fields["shape"])
        first, last = (int(n) for n in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: the header entry of tensor {name} is damaged") from error
    if dtype_name not in _DTYPES:
        raise ModelError(
            f"{path}: tensor {name} has dtype {dtype_name}; known: {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[dtype_name]
    if first < 0 or last - first != math.prod(shape) * dtype.itemsize:
        raise ModelError(
            f"{path}: tensor {name}: {last - first} bytes do not fit {dtype_name} {shape}"
        )
    if data_start + last > size:
        raise ModelError(
            f"{path}: truncated: tensor {name} ends at byte {data_start + last}, the file at {size}"
        )
    return _Entry(path, dtype, shape, data_start + first)
