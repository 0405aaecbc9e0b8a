"""The model-source contract: finding a model and reading its parts.

``--model`` is a string; each source says whether it understands it and opens it as a `ModelFiles`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from pydantic import BaseModel
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """What a model source is built with.

    Attributes:
        settings: The source's own settings section, or ``None``.
        revision: Branch, tag or commit for sources that have them.
    """

    settings: BaseModel | None = None
    revision: str | None = None


class WeightReader(ABC):
    """Tensors of a checkpoint, streamed; only what is asked for is read from disk."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Yield the name of every tensor once, Hugging Face spelling, in storage order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""

    @abstractmethod
    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Read a part of a tensor to the host, in the dtype in which it is stored.

        Raises:
            ModelError: The file is damaged; the message names file and tensor.
        """

    @abstractmethod
    def where(self, name: str | None = None) -> str:
        """Say in which file a tensor is, or, without one that is known, where the weights are."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files; safe to call twice."""


class ModelFiles(ABC):
    """One opened model.

    Attributes:
        name: What to call it (the served model's default name).
        config: The content of ``config.json``, or its equivalent from GGUF metadata.
        generation_config: The content of ``generation_config.json``, or empty.
    """

    name: str
    config: dict[str, Any]  # free-form JSON of many model families
    generation_config: dict[str, Any]  # free-form JSON of many model families

    @abstractmethod
    def open_weights(self) -> WeightReader:
        """Open the weights.

        Raises:
            ModelError: Weights are missing, duplicated, truncated or of an unknown format; the
                message names the file.
        """

    @abstractmethod
    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, with its chat template where it has one.

        Raises:
            ModelError: It is missing or damaged.
        """


class ModelSource(ABC):
    """A way to find models. ``factory(config: SourceConfig) -> ModelSource``.

    Opening writes nothing, but into a cache of downloads that the source keeps.
    """

    @classmethod
    def write_sample(cls, folder: Path) -> str:
        """Write a small model of this source's kind, for the conformance suite.

        A source that opens folders in Hugging Face layout need not have this; one that cannot
        make a model, such as one of a hub, is tested with ``--source-model``.

        Args:
            folder: An empty one. All of the sample lies in it.

        Returns:
            What a user would type after ``--model``.

        Raises:
            NotImplementedError: The source makes no samples.
        """
        raise NotImplementedError(f"{cls.__name__} makes no samples")

    @abstractmethod
    def accepts(self, model: str) -> bool:
        """Return whether ``model`` looks like something that this source can open.

        No I/O beyond looking at the file system.
        """

    @abstractmethod
    def open(self, model: str) -> ModelFiles:
        """Find and open a model.

        Raises:
            ModelError: There is no such model, or it is incomplete; the message says where it was
                looked for.
        """
