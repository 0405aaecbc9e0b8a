"""The model source for one ``.gguf`` file (or the first part of a split one)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.errors import ModelError
from minisgl.weights.contract import ModelFiles, ModelSource, SourceConfig
from minisgl.weights.gguf_config import read_model_metadata
from minisgl.weights.gguf_file import GGUFFile
from minisgl.weights.user_path import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minisgl.weights.gguf_reader import GGUFWeightReader


class GGUFFiles(ModelFiles):
    """A model in a GGUF file."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Read metadata and tensor table.

        Args:
            path: The file.
            name: What to call the model; by default the file's name without its ending.

        Raises:
            ModelError: The file is missing, damaged, or of an architecture that we do not run.
        """
        self._file = GGUFFile(path)
        self._model = read_model_metadata(self._file)
        self.name = name or path.stem
        self.config = self._model.config
        self.generation_config = self._model.generation_config

    def open_weights(self) -> GGUFWeightReader:
        """Open the weights; they are dequantised while they are read."""
        # Imports torch, which a look at the configuration alone should not wait for.
        from minisgl.weights.gguf_reader import GGUFWeightReader  # noqa: PLC0415

        return GGUFWeightReader(self._file, self._model)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Build the tokenizer from the file's metadata."""
        # Imports transformers, for the same reason.
        from minisgl.weights.gguf_tokenizer import build_gguf_tokenizer  # noqa: PLC0415

        return build_gguf_tokenizer(self._file)


class GGUFSource(ModelSource):
    """Opens GGUF files."""

    def __init__(self, config: SourceConfig) -> None:
        """Take the configuration, of which a file needs nothing."""
        del config

    def accepts(self, model: str) -> bool:
        """Return whether the name ends in ``.gguf``, whether it exists or not."""
        return model.lower().endswith(".gguf")

    def open(self, model: str) -> GGUFFiles:
        """Open the file."""
        path = user_path(model)
        if path is None:
            raise ModelError(f"--model {model!r:.80}: is no path of a .gguf file")
        return GGUFFiles(path)
