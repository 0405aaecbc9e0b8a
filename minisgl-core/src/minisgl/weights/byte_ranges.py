"""Reads byte ranges of files into memory that the caller owns."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import numpy as np


class ByteRanges:
    """Keeps files open between reads, as a checkpoint of 20,000 tensors is one file or a few.

    Plain reads, no mapping: only the wanted bytes enter memory, and none of the file counts as
    ours. Not for several threads at once.
    """

    def __init__(self) -> None:
        """Open nothing yet."""
        self._files: dict[Path, FileIO] = {}

    def read(self, path: Path, offset: int, size: int) -> np.ndarray:
        """Read ``size`` bytes; returns ``[size]`` uint8, fewer where the file ends before."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = FileIO(path)
        file.seek(offset)
        buffer = np.empty(size, np.uint8)
        filled = 0
        while filled < size:  # one call reads 2 GiB at most
            count = file.readinto(buffer[filled:].data)
            if not count:
                return buffer[:filled]
            filled += count
        return buffer

    def read_pieces(
        self, path: Path, offset: int, shape: tuple[int, int], stride: int
    ) -> np.ndarray:
        """Read equally spaced pieces, and nothing between them.

        Args:
            path: The file.
            offset: Of the first piece.
            shape: Number of pieces, and bytes of each.
            stride: Bytes from the start of one to the start of the next.

        Returns:
            ``[num_pieces * piece_bytes]`` uint8, fewer where the file ends before.
        """
        num_pieces, piece_bytes = shape
        buffer = np.empty(shape, np.uint8)
        for i in range(num_pieces):
            piece = self.read(path, offset + i * stride, piece_bytes)
            if piece.size != piece_bytes:
                return buffer[:i].reshape(-1)
            buffer[i] = piece
        return buffer.reshape(-1)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __del__(self) -> None:
        """Close what nobody closed."""
        self.close()
