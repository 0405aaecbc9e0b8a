"""The model contract: what the engine needs of an architecture.

An architecture is registered under its Hugging Face class name in the entry-point group
``minisgl.model``; its factory is called with a `ModelBuild`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.device import empty_parameter
from minisgl.layers.base import BaseOP

if TYPE_CHECKING:
    from minisgl.attention.contract import LayerAttention
    from minisgl.distributed.contract import Communicator
    from minisgl.models.config import ModelConfig
    from minisgl.ops.contract import KernelTable


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """What a model is built with.

    Attributes:
        config: The normalised configuration of the checkpoint.
        dtype: Of weights and activations.
        device: Where parameters live.
        kernels: The op table; layers keep the ops that they call.
        comm: Collectives of the tensor-parallel group.
        max_seq_len: Positions that the model has to know; ``None`` for those of its context.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kernels: KernelTable
    comm: Communicator
    max_seq_len: int | None = None

    def empty(self, *shape: int) -> torch.Tensor:
        """Allocate a parameter, uninitialised."""
        return empty_parameter(shape, self.dtype, self.device)


class Model(BaseOP):
    """A causal language model. ``factory(build: ModelBuild) -> Model``.

    Parameters are allocated (uninitialised) by the constructor, filled through `load_targets`, and
    made ready by `finalize`.

    Attributes:
        num_kv_heads: KV heads of this rank, replicas included.
        num_qo_heads: Query heads of this rank.
        head_dim: Of each head.
        vocab_size: Tokens of the vocabulary; the width of the logits.
        layers_attention: How each layer attends, by layer id.
    """

    num_kv_heads: int
    num_qo_heads: int
    head_dim: int
    vocab_size: int
    layers_attention: tuple[LayerAttention, ...]

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:  # Any: free-form JSON
        """Return the config.json of a small model, which the conformance suite builds.

        A few layers of some dozen channels, a vocabulary of some hundred tokens, at least 96
        positions, head counts that two ranks can share, and whatever sets the architecture apart
        switched on. With ``model_type``, where transformers knows the architecture, the suite also
        compares with it; where ``tie_word_embeddings`` is named, it tries both values.
        ``architectures`` may be left out.

        Raises:
            NotImplementedError: The architecture does not say.
        """
        raise NotImplementedError(f"{cls.__name__} has no tiny_config")

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Compute the active batch of the global context.

        Returns:
            ``[num_rows, vocab_size]`` logits of the model's dtype: one row per request in decode,
            one per entry of ``batch.sample_rows`` in prefill (no row at all when that is empty).
        """
