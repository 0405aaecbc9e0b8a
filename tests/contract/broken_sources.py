"""Model sources with one fault each; all but for that open folders."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from minisgl.errors import ModelError
from minisgl.weights.contract import ModelFiles, WeightReader
from minisgl.weights.local import FolderFiles, LocalSource
from minisgl.weights.safetensors_reader import SafetensorsReader


class BrokenFiles(FolderFiles):
    """A folder whose reader can be exchanged."""

    reader: type[SafetensorsReader] = SafetensorsReader

    def open_weights(self) -> SafetensorsReader:
        return self.reader(self._folder)


class BrokenSource(LocalSource):
    """No fault; it opens `BrokenFiles`."""

    files: type[BrokenFiles] = BrokenFiles

    def open(self, model: str) -> FolderFiles:
        super().open(model)
        return self.files(Path(model), Path(model).name)


class AcceptsEverything(BrokenSource):
    """Takes every string for a model."""

    def accepts(self, model: str) -> bool:
        return True


class AcceptsNothing(BrokenSource):
    """Declines what it could open; it makes a sample, so that the suite has one."""

    @classmethod
    def write_sample(cls, folder: Path) -> str:
        # Imported here: the kit is not needed by those who only look.
        from minisgl.testing.source_case import write_tiny_model  # noqa: PLC0415

        return str(write_tiny_model(folder / "model"))

    def accepts(self, model: str) -> bool:
        return False


class AsksTheNetwork(BrokenSource):
    """Looks whether there is a server before it answers."""

    def accepts(self, model: str) -> bool:
        with suppress(OSError), socket.socket() as line:
            line.connect(("127.0.0.1", 9))
        return super().accepts(model)


class RaisesWhatComes(BrokenSource):
    """Lets the errors of the file system pass."""

    def open(self, model: str) -> FolderFiles:
        json.loads((Path(model) / "config.json").read_text())
        return super().open(model)


class NamesNoFile(BrokenSource):
    """Says that something is wrong and not what."""

    def open(self, model: str) -> FolderFiles:
        try:
            return super().open(model)
        except ModelError as error:
            raise ModelError("the model cannot be opened") from error


class _ShortReader(SafetensorsReader):
    """Fills up what a file lacks."""

    def __init__(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        size = len(path.read_bytes()) if path.exists() else 0
        header = int.from_bytes(path.read_bytes()[:8], "little") if size > 8 else 0
        entries = json.loads(path.read_bytes()[8 : 8 + header]) if size > 8 + header else {}
        entries.pop("__metadata__", None)
        end = 8 + header + max((e["data_offsets"][1] for e in entries.values()), default=0)
        if 0 < size < end:
            with path.open("ab") as file:
                file.write(bytes(end - size))
        super().__init__(folder)


class _WholeReader(SafetensorsReader):
    """Reads everything, whatever part was asked for."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return super().read(name, tuple(slice(None) for _ in index))


class _RepeatingReader(SafetensorsReader):
    """Yields a tensor twice."""

    def names(self) -> Iterator[str]:
        names = list(super().names())
        return iter([*names, names[0]])


class _PlacelessReader(SafetensorsReader):
    """Does not say where anything is."""

    def where(self, name: str | None = None) -> str:
        return ""


class _OnceReader(SafetensorsReader):
    """Cannot be closed twice."""

    _is_closed = False

    def close(self) -> None:
        assert not self._is_closed, "closed already"
        self._is_closed = True
        super().close()


class _ShiftingReader(SafetensorsReader):
    """Reads parts of a tensor one row too early."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        whole = super().read(name, tuple(slice(None) for _ in index))
        return whole.roll(1, 0)[index] if index[0].start else whole[index]


def with_reader(reader: type[SafetensorsReader]) -> type[BrokenFiles]:
    return type("Files", (BrokenFiles,), {"reader": reader})


class FillsUpWhatIsCut(BrokenSource):
    files = with_reader(_ShortReader)


class ReadsTooMuch(BrokenSource):
    files = with_reader(_WholeReader)


class RepeatsATensor(BrokenSource):
    files = with_reader(_RepeatingReader)


class KnowsNoPlaces(BrokenSource):
    files = with_reader(_PlacelessReader)


class ClosesOnce(BrokenSource):
    files = with_reader(_OnceReader)


class ReadsOneRowTooEarly(BrokenSource):
    files = with_reader(_ShiftingReader)


class SharesOneReader(BrokenSource):
    """All readers of a source are one."""

    def open(self, model: str) -> FolderFiles:
        files = super().open(model)
        reader: list[WeightReader] = []

        def open_weights() -> WeightReader:
            if not reader:
                reader.append(_Closing(Path(model)))
            return reader[0]

        files.open_weights = open_weights  # type: ignore[method-assign,assignment]  # one fault
        return files


class _Closing(SafetensorsReader):
    _is_closed = False

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        assert not self._is_closed, "the reader is closed"
        return super().read(name, index)

    def close(self) -> None:
        self._is_closed = True
        super().close()


class LeavesAMarker(BrokenSource):
    """Writes beside the model."""

    def open(self, model: str) -> FolderFiles:
        files = super().open(model)
        (Path(model) / ".opened").touch()
        return files


class WritesWhereItIs(BrokenSource):
    """Writes into the working directory."""

    def open(self, model: str) -> FolderFiles:
        files = super().open(model)
        Path("model.cache").touch()
        return files


class HasNoName(BrokenSource):
    """Calls the model nothing."""

    def open(self, model: str) -> FolderFiles:
        files = super().open(model)
        files.name = ""
        return files


class KeepsPathsInTheConfig(BrokenSource):
    """Puts objects into what should be JSON."""

    def open(self, model: str) -> FolderFiles:
        files = super().open(model)
        files.config["torch_dtype"] = torch.float32
        return files


class LosesTheTokenizer(BrokenSource):
    """Gives out the tokenizer of another model."""

    def open(self, model: str) -> ModelFiles:  # type: ignore[override]  # as the contract has it
        files = super().open(model)

        def load_tokenizer() -> object:
            tokenizer = FolderFiles.load_tokenizer(files)
            tokenizer.add_tokens([f"<{i}>" for i in range(300)] + ["The"])
            return tokenizer

        files.load_tokenizer = load_tokenizer  # type: ignore[method-assign,assignment]  # one fault
        return files
