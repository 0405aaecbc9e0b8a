"""A model of an architecture under test, with everything around it that an engine would bring."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.contract import AttentionConfig
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.core import Batch, Context
from minisgl.distributed.contract import Communicator
from minisgl.distributed.single import SingleCommunicator
from minisgl.kvcache.pool import KVPool, PoolShape
from minisgl.layers.base import LoadTarget
from minisgl.models.config import ModelConfig, normalize_config
from minisgl.models.contract import Model, ModelBuild
from minisgl.moe.contract import MoEConfig
from minisgl.moe.torch_backend import TorchMoEBackend
from minisgl.ops.contract import KernelConfig
from minisgl.ops.table import build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet
from minisgl.testing.paged_batches import PagedBatches, Step, scattered_pages
from minisgl.testing.selection import TestedBackend
from minisgl.weights.contract import WeightReader
from minisgl.weights.loader import load_weights

MAX_SEQ_LEN = 96
MAX_REQS = 6
PAGE_SIZE = 4


@dataclass(frozen=True, slots=True)
class MemoryReader(WeightReader):
    """A checkpoint in memory.

    Attributes:
        weights: Whole tensors by their Hugging Face names.
    """

    weights: Mapping[str, Tensor]

    def names(self) -> Iterator[str]:
        """Yield all names."""
        return iter(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self.weights[name].shape)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return a part."""
        return self.weights[name][index]

    def where(self, name: str | None = None) -> str:
        """Say that there is no file."""
        return "the suite's checkpoint"

    def close(self) -> None:
        """Do nothing."""


def wanted_tensors(targets: Iterable[tuple[str, LoadTarget]]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint of the model has to hold."""
    return {
        name: target.shape
        for name, target in targets
        if not target.is_optional and not target.replaces and target.shape
    }


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Make a checkpoint; matrices keep the size of what they multiply, norms are about 1."""
    weights = {}
    for name, shape in shapes.items():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=random)
        if len(shape) == 1:
            weights[name] = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
        else:
            weights[name] = noise / math.sqrt(shape[-1])
    return weights


class ModelCase:
    """One rank of a loaded model, and requests with random tokens in scattered pages.

    Attributes:
        model: Loaded and finalized.
        batches: Makes batches; row i of its ``tokens`` is request i.
        pool: Keys and values.
    """

    def __init__(
        self,
        backend: TestedBackend,
        config: ModelConfig,
        reader: WeightReader,
        dtype: torch.dtype = torch.float32,
        comm: Communicator | None = None,
    ) -> None:
        """Build, load and finalize a model, then what it reads."""
        self.config = config
        self._dtype = dtype
        self._device = torch.device(backend.machine.device)
        comm = SingleCommunicator() if comm is None else comm
        self.context = Context(PAGE_SIZE)
        self.context.comm = comm
        kernels = TorchKernelSet(KernelConfig(self._device, dtype))
        self.context.kernels = build_kernel_table([("torch", kernels)])
        build = ModelBuild(config, dtype, self._device, self.context.kernels, comm, MAX_SEQ_LEN)
        with torch.inference_mode(), self.context.activate():
            self.model: Model = backend.build(build)
            load_weights(list(self.model.load_targets()), reader)
            self.model.finalize()
        self._fill_context(comm.size)

    def forward(self, batch: Batch) -> Tensor:
        """Plan and compute a batch; returns the logits."""
        self.context.attn_backend.prepare_metadata(batch)
        return self.compute(batch)

    def compute(self, batch: Batch) -> Tensor:
        """Compute a batch whose attention is planned."""
        with torch.inference_mode(), self.context.forward_batch(batch):
            return self.model.forward()

    def prefill(self, steps: Sequence[Step], is_sampled: Sequence[bool] | None = None) -> Tensor:
        """Compute prompt tokens."""
        return self.forward(self.batches.prefill(steps, is_sampled))

    def decode(self, steps: Sequence[Step], padded_size: int = 0) -> Tensor:
        """Compute one token each."""
        return self.forward(self.batches.decode(steps, padded_size))

    def _fill_context(self, num_ranks: int) -> None:
        """Make pool, page table and backends."""
        ctx, model, config = self.context, self.model, self.config
        max_pages = -(-MAX_SEQ_LEN // PAGE_SIZE)
        num_layers = len(model.layers_attention)
        shape = PoolShape(
            num_layers, MAX_REQS * max_pages + 2, PAGE_SIZE, model.num_kv_heads, model.head_dim
        )
        self.pool = ctx.kv_pool = KVPool(shape, self._dtype, self._device)
        pages = scattered_pages(MAX_REQS, max_pages, 2, seed=0)
        self.batches = PagedBatches(
            pages, self.pool.dummy_page, PAGE_SIZE, MAX_SEQ_LEN, self._device
        )
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (MAX_REQS, MAX_SEQ_LEN))
        self.batches.tokens[:MAX_REQS] = tokens
        ctx.page_table = self.batches.device_table
        attention = AttentionConfig(
            context=ctx,
            num_qo_heads=model.num_qo_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self._dtype,
            device=self._device,
            layers=model.layers_attention,
            max_running_reqs=MAX_REQS,
            max_seq_len=MAX_SEQ_LEN,
        )
        ctx.attn_backend = TorchAttentionBackend(attention)
        if config.moe is not None:
            ctx.moe_backend = TorchMoEBackend(
                MoEConfig(
                    num_experts=config.moe.num_experts,
                    top_k=config.moe.top_k,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.moe.intermediate_size // num_ranks,
                    is_renormalized=config.moe.is_renormalized,
                    dtype=self._dtype,
                    device=self._device,
                    max_num_tokens=MAX_REQS * MAX_SEQ_LEN,
                )
            )


def whole_prompts(seq_lens: Sequence[int]) -> list[Step]:
    """Return the steps that compute rows 0, 1, … from their beginning."""
    return [Step(row, 0, seq_len) for row, seq_len in enumerate(seq_lens)]


def tiny_config(backend: TestedBackend) -> dict[str, Any]:  # Any: JSON
    """Return the config.json of the suite's model of an architecture."""
    factory: Any = backend.factory  # Any: a class, or a function with an attribute
    rule = "a model's factory has tiny_config(), which returns the config.json of a small model"
    assert hasattr(factory, "tiny_config"), rule
    try:
        config = dict(factory.tiny_config())
    except NotImplementedError as error:
        raise AssertionError(rule) from error
    config.setdefault("architectures", [backend.name if backend.is_installed else factory.__name__])
    return config


def read_config(backend: TestedBackend, config: Mapping[str, Any]) -> ModelConfig:  # Any: JSON
    """Normalise a config.json as an engine does."""
    adapt = backend.spec.adapt_config
    known = set(config["architectures"])
    return normalize_config(config if adapt is None else adapt(config), known)


@dataclass(frozen=True, slots=True)
class TrackedBuild(ModelBuild):
    """Remembers the parameters that a model allocates.

    Attributes:
        allocated: What `empty` returned, in order.
    """

    allocated: list[Tensor] = field(default_factory=list)

    def empty(self, *shape: int) -> Tensor:
        """Allocate a parameter and remember it."""
        tensor = ModelBuild.empty(self, *shape)
        self.allocated.append(tensor)
        return tensor


def build_unloaded(backend: TestedBackend, config: ModelConfig) -> tuple[Model, list[Tensor]]:
    """Build a model of one rank without loading it; returns it and its parameters."""
    device = torch.device(backend.machine.device)
    context = Context(PAGE_SIZE)
    context.comm = SingleCommunicator()
    kernels = TorchKernelSet(KernelConfig(device, torch.float32))
    context.kernels = build_kernel_table([("torch", kernels)])
    build = TrackedBuild(config, torch.float32, device, context.kernels, context.comm, MAX_SEQ_LEN)
    with torch.inference_mode(), context.activate():
        model: Model = backend.build(build)
    return model, build.allocated


def random_checkpoint(backend: TestedBackend, config: ModelConfig) -> MemoryReader:
    """Make random weights for a configuration."""
    model, _ = build_unloaded(backend, config)
    return MemoryReader(random_weights(wanted_tensors(model.load_targets())))
