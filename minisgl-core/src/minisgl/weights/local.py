"""The model source for a folder in Hugging Face layout."""

from __future__ import annotations

import json
import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.errors import ModelError
from minisgl.weights.contract import ModelFiles, ModelSource, SourceConfig
from minisgl.weights.user_path import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minisgl.weights.safetensors_reader import SafetensorsReader

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json",
)  # fmt: skip

# Classes that take tokenizer.json as it is, so that no look-up by model type is needed.
_PLAIN_TOKENIZERS = (
    "PreTrainedTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "TokenizersBackend",
)


class FolderFiles(ModelFiles):
    """A model in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read the configuration.

        Args:
            folder: With ``config.json``, safetensors and tokenizer files.
            name: What to call the model.

        Raises:
            ModelError: There is no ``config.json``, or a JSON file is damaged.
        """
        self._folder = folder
        self.name = name
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: holds no config.json{_hint(folder)}")
        self.config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config = _read_json(generation) if generation.is_file() else {}

    def open_weights(self) -> SafetensorsReader:
        """Open the safetensors in Hugging Face format; other formats beside them are left out."""
        # Imports torch, which a look at the configuration alone should not wait for.
        from minisgl.weights.safetensors_reader import (  # noqa: PLC0415
            INDEX_NAME,
            SINGLE_NAME,
            SafetensorsReader,
        )

        consolidated = sorted(p.name for p in self._folder.glob("consolidated*"))
        shards = [
            p for p in self._folder.glob("*.safetensors") if not p.name.startswith("consolidated")
        ]
        if not shards and not (self._folder / INDEX_NAME).is_file():
            raise ModelError(
                f"{self._folder}: holds no {SINGLE_NAME} and no {INDEX_NAME}{_hint(self._folder)}"
            )
        if consolidated:
            logger.info(
                "%s: weights are in two formats; the Hugging Face shards are loaded and %s is not",
                self._folder,
                consolidated[0],
            )
        return SafetensorsReader(self._folder)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, from this folder only."""
        if not any((self._folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError(
                f"{self._folder}: holds no tokenizer; looked for {_TOKENIZER_FILES[0]}"
            )
        try:
            tokenizer: PreTrainedTokenizerBase = self._tokenizer_class().from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        # The library's parsers raise bare Exception too for a damaged file.
        except Exception as error:
            raise ModelError(f"{self._folder}: the tokenizer cannot be loaded: {error}") from error
        return tokenizer

    def _tokenizer_class(self) -> type[PreTrainedTokenizerBase]:
        """Return the class that the folder names, where that is one without surprises.

        The auto class resolves every name, but importing it brings in modelling, generation and
        ``torch.distributed`` code, which takes up to nine seconds.
        """
        path = self._folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        name = config.get("tokenizer_class") if isinstance(config, dict) else None
        if name not in _PLAIN_TOKENIZERS or not (self._folder / "tokenizer.json").is_file():
            name = "AutoTokenizer"
        # Heavy, and the auto class very much so.
        tokenizer_class: type[PreTrainedTokenizerBase] = getattr(
            import_module("transformers"), name
        )
        return tokenizer_class


class LocalSource(ModelSource):
    """Opens folders."""

    def __init__(self, config: SourceConfig) -> None:
        """Take the configuration, of which a folder needs nothing."""
        del config

    def accepts(self, model: str) -> bool:
        """Return whether ``model`` is a folder."""
        path = user_path(model)
        return path is not None and path.is_dir()

    def open(self, model: str) -> FolderFiles:
        """Open the folder."""
        folder = user_path(model)
        if folder is None:
            raise ModelError(f"--model {model!r:.80}: is no path of a folder")
        if not folder.is_dir():
            kind = "a file, not a folder" if folder.exists() else "no such folder"
            raise ModelError(f"--model {model}: {kind}; looked in {folder.parent.resolve()}")
        return FolderFiles(folder, folder.resolve().name)


def _hint(folder: Path) -> str:
    """Say what a folder holds instead of what was looked for."""
    gguf = sorted(p.name for p in folder.glob("*.gguf"))
    if gguf:
        return f", but {gguf[0]}; name that file to load it"
    if any(folder.glob("consolidated*")):
        return ", only Mistral's consolidated format; the Hugging Face format is needed"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return ", only pickled weights, which are not loaded; convert them to safetensors"
    return ""


def _read_json(path: Path) -> dict[str, Any]:  # free-form JSON
    """Read a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return content
