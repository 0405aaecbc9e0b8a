"""The GGUF container: metadata and tensor table of one file, or of all parts of a split one.

Written from the format's specification (versions 2 and 3). The metadata is parsed straight from
the file's bytes because vocabularies of 150,000 strings have to load in a blink; tensor data is
read on demand, without mapping the file, so that it never counts as our memory.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from minisgl.errors import ModelError
from minisgl.weights.byte_ranges import ByteRanges

_MAGIC = b"GGUF"
_SCALARS = "BbHhIif?"  # struct codes of the value types 0 to 7
_TYPE_STRING, _TYPE_ARRAY = 8, 9
_WIDE_SCALARS = {10: "Q", 11: "q", 12: "d"}
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")

MetaValue = (
    Any  # numbers, strings, booleans and lists of them: what a file holds is up to its maker
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table.

    Attributes:
        name: As the file spells it.
        shape: Row-major, the contiguous dimension last (the file stores it the other way round).
        qtype: Storage type.
        path: File that holds the data.
        offset: First byte in that file.
        row_bytes: Bytes of one row, that is of ``shape[-1]`` elements.
    """

    name: str
    shape: tuple[int, ...]
    qtype: GGMLQuantizationType
    path: Path
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Product of all dimensions but the last."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))


class GGUFFile:
    """Metadata and tensor table.

    Attributes:
        path: File that was asked for, the first part of a split model.
        metadata: Values by key.
        tensors: Entries by name, in storage order.
    """

    def __init__(self, path: Path) -> None:
        """Parse a file, and its further parts if it was split.

        Args:
            path: File, or any part of a split model.

        Raises:
            ModelError: A part is missing, truncated, damaged or of an unknown version.
        """
        parts = _all_parts(path)
        self.path = parts[0]
        self._ranges = ByteRanges()
        self.metadata: dict[str, MetaValue] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        for part in parts:
            metadata, tensors = _parse(part)
            self.metadata = metadata | self.metadata  # the first part holds the model's own
            for tensor in tensors:
                if tensor.name in self.tensors:
                    raise ModelError(f"{part}: tensor {tensor.name} is stored twice")
                self.tensors[tensor.name] = tensor
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ModelError(f"{path}: {len(self.tensors)} tensors in all parts, not {expected}")

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Read rows ``first`` to ``last`` (exclusive) as they are stored.

        Returns:
            ``[last - first, row_bytes]`` uint8, owned by the caller.

        Raises:
            ModelError: The file got shorter since it was opened.
        """
        tensor = self.tensors[name]
        size = (last - first) * tensor.row_bytes
        raw = self._ranges.read(tensor.path, tensor.offset + first * tensor.row_bytes, size)
        if raw.size != size:
            raise ModelError(f"{tensor.path}: truncated in tensor {name}")
        return raw.reshape(last - first, tensor.row_bytes)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._ranges.close()


def _all_parts(path: Path) -> list[Path]:
    """Return the file itself, or every part of the split model that it belongs to."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; looked in {path.parent.resolve()}")
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ModelError(f"{path}: {len(missing)} of {count} parts missing, such as {missing[0]}")
    return [path.parent / name for name in names]


def _parse(path: Path) -> tuple[dict[str, MetaValue], list[GGUFTensor]]:
    """Parse header, metadata and tensor table of one file."""
    size = path.stat().st_size
    if size < 24:
        raise ModelError(f"{path}: {size} bytes are no GGUF file; was the download cut off?")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC:
            hint = "a Git LFS pointer, not the file" if data[:8] == b"version " else "not GGUF"
            raise ModelError(f"{path}: starts with {data[:8]!r}: {hint}")
        cursor = _Cursor(data, path)
        version, num_tensors, num_values = cursor.unpack("IQQ")
        if version not in (2, 3):
            raise ModelError(
                f"{path}: GGUF version {version} (or big-endian); little-endian 2 and 3 are read"
            )
        metadata = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.unpack("I")[0])
        table = [_Entry(cursor) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-cursor.position // alignment) * alignment
    return metadata, [entry.locate(path, start, size) for entry in table]


class _Entry:
    """A tensor-table entry whose place in the file is not known yet."""

    def __init__(self, cursor: _Cursor) -> None:
        self.name = cursor.string()
        (num_dims,) = cursor.unpack("I")
        if num_dims > 4:
            raise ModelError(
                f"{cursor.path}: tensor {self.name} has {num_dims} dimensions; at most 4"
            )
        self.shape = tuple(reversed(cursor.unpack("Q" * num_dims)))
        self.type_id, self.offset = cursor.unpack("IQ")

    def locate(self, path: Path, start: int, file_size: int) -> GGUFTensor:
        """Place the tensor in the file and check that all of it is there."""
        try:
            qtype = GGMLQuantizationType(self.type_id)
        except ValueError as error:
            raise ModelError(
                f"{path}: tensor {self.name} has type {self.type_id}, unknown to the installed gguf"
            ) from error
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        width = self.shape[-1] if self.shape else 1
        if width % block:
            raise ModelError(f"{path}: tensor {self.name}: {width} is no multiple of block {block}")
        tensor = GGUFTensor(
            self.name,
            self.shape or (1,),
            qtype,
            path,
            start + self.offset,
            width // block * block_bytes,
        )
        end = tensor.offset + tensor.num_rows * tensor.row_bytes
        if end > file_size:
            raise ModelError(
                f"{path}: truncated: tensor {self.name} ends at byte {end}, the file at {file_size}"
            )
        return tensor


class _Cursor:
    """Reads little-endian values from a mapped file, one after the other."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = len(_MAGIC)

    def unpack(self, codes: str) -> tuple[Any, ...]:
        """Read values by their struct codes, without padding."""
        layout = struct.Struct("<" + codes)
        self._need(layout.size)
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values

    def string(self) -> str:
        """Read a length-prefixed string."""
        (length,) = self.unpack("Q")
        self._need(length)
        raw = self.data[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8", errors="replace")

    def value(self, type_id: int) -> MetaValue:
        """Read a metadata value of the given type."""
        if type_id == _TYPE_STRING:
            return self.string()
        if type_id == _TYPE_ARRAY:
            item_type, length = self.unpack("IQ")
            return self._array(item_type, length)
        return self.unpack(self._code(type_id))[0]

    def _array(self, item_type: int, length: int) -> list[MetaValue]:
        self._need(length)  # every item takes a byte at least: a damaged length fails here
        if item_type == _TYPE_STRING:
            return self._strings(length)
        if item_type == _TYPE_ARRAY:
            return [self.value(item_type) for _ in range(length)]
        dtype = np.dtype(self._code(item_type)).newbyteorder("<")
        self._need(length * dtype.itemsize)
        raw = self.data[self.position : self.position + length * dtype.itemsize]
        self.position += length * dtype.itemsize
        values: list[MetaValue] = np.frombuffer(raw, dtype).tolist()
        return values

    def _strings(self, length: int) -> list[MetaValue]:
        """Read a vocabulary; a loop of its own because it runs 300,000 times."""
        data, position, limit = self.data, self.position, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            if position + 8 > limit:
                self._need(limit)
            (size,) = unpack(data, position)
            end = position + 8 + size
            strings.append(data[position + 8 : end].decode("utf-8", errors="replace"))
            position = end
        self.position = position
        self._need(0)
        return strings

    def _code(self, type_id: int) -> str:
        code = _SCALARS[type_id] if type_id < len(_SCALARS) else _WIDE_SCALARS.get(type_id)
        if code is None:
            raise ModelError(f"{self.path}: metadata value of unknown type {type_id}")
        return code

    def _need(self, num_bytes: int) -> None:
        if self.position + num_bytes > len(self.data):
            raise ModelError(f"{self.path}: truncated in the metadata at byte {self.position}")
