"""Prefill steps captured in pieces, cut at the attention calls.

A prefill of few tokens is over on the device before the host has launched its kernels one by one.
What lies between two attention calls has shapes that follow from the number of tokens alone, so it
is captured once per padded number of tokens; attention itself is called as ever, with the batch as
it is, and needs to know nothing of this. (vLLM and SGLang call it piecewise graphs.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.contract import AttentionBackend
from minisgl.core import Batch, Context
from minisgl.models.config import ModelConfig
from minisgl.models.contract import Model

MAX_SAMPLED = 64
"""Requests of a captured prefill that may sample. Rows of the head cost next to nothing."""

_STEP = 64  # tokens; the finest grid of sizes
# What it takes to launch a layer op by op, and to multiply by it, on an H200 and its host.
_LAUNCH_S_PER_LAYER = 0.4e-3
_FLOP_PER_S = 650e12


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What is captured: a model over fixed tensors.

    Attributes:
        model: Loaded and finalized.
        context: Its context.
        batch: ``input_ids``, ``positions``, ``out_loc`` of the padded number of tokens and
            ``sample_rows`` of `MAX_SAMPLED` rows, all at fixed addresses.
        attended: ``[size, num_qo_heads, head_dim]`` from which the model reads what attention
            made; its rows of padding must be finite.
    """

    model: Model
    context: Context
    batch: Batch
    attended: torch.Tensor

    def run(self, attn_backend: AttentionBackend) -> torch.Tensor:
        """Run the model with a stand-in for attention; returns ``[MAX_SAMPLED, vocab_size]``."""
        with self.context.forward_batch(self.batch, attn_backend):
            return self.model.forward()


class PrefillGraph(ABC):
    """A captured prefill of one padded number of tokens."""

    @abstractmethod
    def replay(self, batch: Batch, num_tokens: int) -> torch.Tensor:
        """Submit the step; its fixed inputs are filled and ``batch`` is planned.

        Args:
            batch: The step as attention sees it, without padding.
            num_tokens: Its tokens, at most the captured number.

        Returns:
            ``[MAX_SAMPLED, vocab_size]``, good until the next replay of any graph.
        """


class CudaPieces(PrefillGraph):
    """One CUDA graph before, between and after the attention calls."""

    def __init__(self, step: PrefillStep, pool: Any) -> None:  # Any: torch's handle is opaque
        """Warm the step up and capture it on the current stream."""
        self._step = step
        self._pieces: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, int]] = []
        self._pool = pool
        step.run(_StandIn(lambda q, layer_id: step.attended))
        torch.cuda.current_stream().synchronize()
        self._last = self._begin()
        self._logits = step.run(_StandIn(self._cut))
        self._last.capture_end()

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph

    def _cut(self, q: torch.Tensor, layer_id: int) -> torch.Tensor:
        """End a piece where attention begins, and begin the next."""
        self._last.capture_end()
        self._pieces.append((self._last, _alias(q), layer_id))
        self._last = self._begin()
        return self._step.attended

    def replay(self, batch: Batch, num_tokens: int) -> torch.Tensor:
        """Launch the pieces, and attention between them."""
        backend, attended = self._step.context.attn_backend, self._step.attended[:num_tokens]
        for graph, q, layer_id in self._pieces:
            graph.replay()
            backend.forward_into(attended, q[:num_tokens], layer_id, batch)
        self._last.replay()
        return self._logits


class EmulatedPieces(PrefillGraph):
    """The same contract on a CPU: the model runs again over the fixed tensors alone."""

    def __init__(self, step: PrefillStep) -> None:
        """Run the step once; its result becomes the fixed output."""
        self._step = step
        self._logits = step.run(_StandIn(lambda q, layer_id: step.attended)).clone()

    def replay(self, batch: Batch, num_tokens: int) -> torch.Tensor:
        """Run the step, attending with the batch as it is."""
        backend, attended = self._step.context.attn_backend, self._step.attended

        def attend(q: torch.Tensor, layer_id: int) -> torch.Tensor:
            backend.forward_into(attended[:num_tokens], q[:num_tokens], layer_id, batch)
            return attended

        return self._logits.copy_(self._step.run(_StandIn(attend)))


class PrefillGraphs:
    """All captured prefills of an engine."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        """Take the ascending numbers of tokens to capture; none means graphs are off."""
        self.sizes = sizes
        self._graphs: dict[int, PrefillGraph] = {}
        self._pool: Any = None  # an opaque handle

    def padded_size(self, num_tokens: int, num_sampled: int) -> int | None:
        """Return the smallest captured size that fits, or ``None``: run without graphs."""
        i = bisect_left(self.sizes, num_tokens)
        if not self._graphs or i == len(self.sizes) or num_sampled > MAX_SAMPLED:
            return None
        return self.sizes[i]

    def capture(self, size: int, step: PrefillStep) -> None:
        """Capture a step of ``size`` tokens; larger sizes first, so that memory is reused."""
        if step.attended.device.type == "cuda":
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._graphs[size] = CudaPieces(step, self._pool)
        else:
            self._graphs[size] = EmulatedPieces(step)

    def replay(self, size: int, batch: Batch, num_tokens: int) -> torch.Tensor:
        """Submit a step; see `PrefillGraph.replay`."""
        return self._graphs[size].replay(batch, num_tokens)

    def clear(self) -> None:
        """Let go of them all."""
        self._graphs.clear()


def prefill_graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture: multiples of 64, four to a doubling, and the last.

    Args:
        max_tokens: Most tokens of a captured step; 0 captures none.
    """
    sizes, size = [], _STEP
    while size < max_tokens:
        sizes.append(size)
        size += max(_STEP, 1 << (size.bit_length() - 3))
    return (*sizes, max_tokens) if max_tokens > 0 else ()


def launch_bound_tokens(config: ModelConfig, tp_size: int) -> int:
    """Return how many tokens a GPU computes in the time that the host takes to launch a step.

    It depends on nothing that is measured, so that all ranks agree.
    """
    width = config.moe.top_k * config.moe.intermediate_size if config.moe else 0
    width = width or config.intermediate_size
    heads = 2 * (config.num_qo_heads + config.num_kv_heads) * config.head_dim
    flop_per_token = 2 * config.hidden_size * (heads + 3 * width) / tp_size
    num_tokens = int(_LAUNCH_S_PER_LAYER * _FLOP_PER_S / flop_per_token)
    return num_tokens // _STEP * _STEP


class _StandIn(AttentionBackend):
    """Attention as a function of the queries and the layer."""

    def __init__(self, attend: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self._attend = attend

    def prepare_metadata(self, batch: Batch) -> None:
        """Plan nothing: the step's own backend has."""

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Call the function."""
        return self._attend(q, layer_id)


class _DeviceArray:
    """An address that ``torch.as_tensor`` turns into a tensor without owning the memory."""

    def __init__(self, interface: dict[str, Any]) -> None:  # Any: the protocol mixes types
        self.__cuda_array_interface__ = interface


def _alias(x: torch.Tensor) -> torch.Tensor:
    """Return a second tensor over the memory of ``x`` that does not keep it alive.

    Were the queries of every layer kept, no layer of a graph could use the memory of another one;
    the memory itself stays with the graphs' pool. The protocol does not know bfloat16, so bytes
    are described.
    """
    item = x.element_size()
    strides = tuple(stride * item for stride in x.stride()[:-1])
    view = _DeviceArray(
        {
            "shape": (*x.shape[:-1], x.shape[-1] * item),
            "strides": (*strides, 1),
            "typestr": "|u1",
            "data": (x.data_ptr(), False),
            "version": 3,
        }
    )
    return torch.as_tensor(view, device=x.device).view(x.dtype)
