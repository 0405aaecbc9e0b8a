"""A model for a source under test, and what can become of its files."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from minisgl.distributed.single import SingleCommunicator
from minisgl.errors import ModelError
from minisgl.models.config import normalize_config
from minisgl.models.contract import ModelBuild
from minisgl.models.llama import LlamaForCausalLM
from minisgl.ops.contract import KernelConfig
from minisgl.ops.table import build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet
from minisgl.testing.model_case import random_weights, wanted_tensors
from minisgl.testing.selection import TestedBackend
from minisgl.testing.tiny_checkpoint import write_tiny_checkpoint
from minisgl.weights.contract import ModelFiles, ModelSource, SourceConfig
from minisgl.weights.local import FolderFiles
from minisgl.weights.safetensors_reader import SINGLE_NAME

CPU = torch.device("cpu")


def write_tiny_model(folder: Path) -> Path:
    """Write a small Llama with random weights in Hugging Face layout; returns the folder."""
    write_tiny_checkpoint(folder)
    config = normalize_config(FolderFiles(folder, "tiny").config)
    kernels = build_kernel_table([("torch", TorchKernelSet(KernelConfig(CPU, torch.float32)))])
    build = ModelBuild(config, torch.float32, CPU, kernels, SingleCommunicator())
    shapes = wanted_tensors(LlamaForCausalLM(build).load_targets())
    save_file(random_weights(shapes), folder / SINGLE_NAME)
    return folder


@dataclass(frozen=True, slots=True)
class Sample:
    """A model that a source opens.

    Attributes:
        model: What a user types.
        folder: Where all of its files are, or ``None`` when that is not known; only such a sample
            is damaged.
    """

    model: str
    folder: Path | None

    def files(self) -> list[Path]:
        """Return its files; empty when they are not known."""
        return [] if self.folder is None else list(files_in(self.folder))

    def copied(self, folder: Path) -> Sample:
        """Return a copy whose files may be damaged."""
        assert self.folder is not None, "the sample's files are known"
        shutil.copytree(self.folder, folder)
        return Sample(self.model.replace(str(self.folder), str(folder)), folder)


class SourceCase:
    """A source under test and what to ask it for."""

    def __init__(self, backend: TestedBackend, folder: Path, model: str | None) -> None:
        """Find or make a sample.

        Args:
            backend: The source.
            folder: An empty one for a sample.
            model: What the user named with ``--source-model``.
        """
        self.backend = backend
        self.source: ModelSource = self.build()
        self.sample = self._sample(folder, model)

    def build(self) -> ModelSource:
        """Make the source anew."""
        made: ModelSource = self.backend.build(SourceConfig())
        return made

    def open(self) -> ModelFiles:
        """Open the sample."""
        assert self.sample is not None, "there is a sample"
        return self.source.open(self.sample.model)

    def _sample(self, folder: Path, model: str | None) -> Sample | None:
        if model is not None:
            path = Path(model).expanduser()
            if not path.exists():
                return Sample(model, None)
            # A copy: the suite damages its sample.
            copy = folder / path.name
            shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
            return Sample(str(copy), folder)
        try:
            return Sample(self.source.write_sample(folder), folder)
        except (NotImplementedError, AttributeError):
            path = write_tiny_model(folder / "tiny-model")
            return Sample(str(path), folder) if self.source.accepts(str(path)) else None


def files_in(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, in order of their names."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def fingerprint(folder: Path) -> dict[str, str]:
    """Return a hash of each file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in files_in(folder)
    }


def read_all(files: ModelFiles) -> dict[str, torch.Tensor]:
    """Read every tensor of a model whole."""
    reader = files.open_weights()
    try:
        return {
            name: reader.read(name, tuple(slice(None) for _ in reader.shape(name)))
            for name in reader.names()
        }
    finally:
        reader.close()


def complaint(case: SourceCase, sample: Sample) -> str | None:
    """Open and read all of a damaged sample.

    Returns:
        What the source says is wrong, or ``None`` when it finds nothing. Any other exception than
        its own error passes.
    """
    try:
        files = case.source.open(sample.model)
        files.load_tokenizer()
        read_all(files)
    except ModelError as error:
        return str(error)
    return None
