"""The kernel-set contract: which ops exist, their shapes, and the table that layers call.

A kernel set offers some of the ops for a device and dtype. ``--kernels cuda,fi,torch`` is a chain:
each op comes from the first set that has it, and `KernelTable` is the flat result. Every op is a
plain function; none synchronises with the host, and all can be captured in a CUDA graph. Norms,
activations and products may be given no rows: behind the last attention, a chunk of a prompt that
samples nothing has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pydantic import BaseModel


class RMSNorm(Protocol):
    """``rms_norm``: root-mean-square norm over the last dimension, computed in float32."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm ``x[..., n]`` by ``weight[n]``; returns the same shape and dtype; x is kept."""


class FusedAddRMSNorm(Protocol):
    """``fused_add_rms_norm``: residual add and norm in one."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual) * weight, x + residual)``; both inputs may be overwritten.

        Shapes ``[num_tokens, hidden_size]``.
        """


class Rope(Protocol):
    """``rope``: rotary position embedding, halves rotated (neox style)."""

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first ``rotary_dim`` of each head; q and k may be overwritten.

        Args:
            q: ``[num_tokens, num_heads, head_dim]``; rows may be strided.
            k: ``[num_tokens, num_kv_heads, head_dim]``; rows may be strided.
            positions: ``[num_tokens]`` int32.
            cos_sin_cache: ``[max_positions, rotary_dim]`` float32, cosines then sines.
        """


class RopeRows(Protocol):
    """``rope_rows``: the part of a rotation that all layers of a step share; optional.

    A set that gains from sharing offers it together with ``apply_rope``; both are used only where
    ``rope`` comes from the same set.
    """

    def __call__(
        self, positions: Tensor, cos_sin_cache: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Look up what `ApplyRope` needs for ``positions[num_tokens]``; once per step."""


class ApplyRope(Protocol):
    """``apply_rope``: rotate heads by what `RopeRows` returned; optional."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``x[num_tokens, heads, head_dim]``; queries and keys may share one call."""


class ActAndMul(Protocol):
    """``silu_and_mul``, ``gelu_and_mul``, ``gelu_tanh_and_mul``: gated activation."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``act(x[..., :n]) * x[..., n:]`` for ``x[..., 2n]``."""


class Embedding(Protocol):
    """``embedding``: rows of one rank's part of the vocabulary."""

    def __call__(self, ids: Tensor, weight: Tensor, vocab_start: int) -> Tensor:
        """Look up ``ids[num_tokens]`` int32 in ``weight``, whose first row is ``vocab_start``.

        Ids of other ranks give rows of zeros. Returns ``[num_tokens, hidden_size]``.
        """


class StoreKV(Protocol):
    """``store_kv``: write keys and values of new tokens into one layer of the pool."""

    def __call__(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, out_loc: Tensor
    ) -> None:
        """Scatter rows.

        Args:
            k: ``[num_tokens, num_kv_heads, head_dim]``; rows may be strided.
            v: The same shape.
            k_pool: ``[num_slots, num_kv_heads, head_dim]``, one layer, all pages in a row.
            v_pool: The same shape.
            out_loc: ``[num_tokens]`` int64 slots, distinct except on the dummy page.
        """


class QKNormRopeStore(Protocol):
    """``qk_norm_rope_store``: what happens between the q/k/v product and attention, in one op."""

    def __call__(self, qkv: Tensor, inputs: QKVInputs) -> Tensor:
        """Norm the heads of q and k (if the model does), rotate both, store k and v.

        Args:
            qkv: ``[num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim]``; may be changed.
            inputs: Weights, positions and pool.

        Returns:
            The rotated q, ``[num_tokens, num_qo_heads, head_dim]``; may be a view of ``qkv``.
        """


class QKVInputs(NamedTuple):
    """What `QKNormRopeStore` needs beside the product.

    All of it but the pools is a step's input or was loaded: a set may read it while work in front
    of the op still runs, so a model does not compute it there.

    Attributes:
        num_qo_heads: Query heads of this rank.
        num_kv_heads: KV heads of this rank.
        head_dim: Of each head.
        q_norm: ``[head_dim]`` weight of the per-head q norm, or ``None``.
        k_norm: ``[head_dim]`` weight of the per-head k norm, or ``None``.
        eps: Of these norms.
        positions: ``[num_tokens]`` int32.
        cos_sin_cache: ``[max_positions, rotary_dim]`` float32.
        k_pool: ``[num_slots, num_kv_heads, head_dim]``.
        v_pool: ``[num_slots, num_kv_heads, head_dim]``.
        out_loc: ``[num_tokens]`` int64.
        rope_rows: What `RopeRows` returned for these positions, where the table has it.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    positions: Tensor
    cos_sin_cache: Tensor
    k_pool: Tensor
    v_pool: Tensor
    out_loc: Tensor
    rope_rows: tuple[Tensor, Tensor] | None = None


class PackedLinear(Protocol):
    """A weight in the form that its kernel set multiplies by."""

    @property
    def is_original_needed(self) -> bool:
        """Whether the tensor given to ``pack_linear`` is still read; if not, drop it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[..., in_features] @ weight.T + bias`` as ``[..., out_features]``."""


PackLinear = Callable[[Tensor, Tensor | None], PackedLinear]
"""``pack_linear(weight[out, in], bias[out] | None)``: called once per weight after loading."""

GatedActivation = Literal["silu", "gelu", "gelu_tanh"]
"""An `ActAndMul` op without its last part, ``_and_mul``."""


class PackGatedLinear(Protocol):
    """``pack_gated_linear``: the product and the gated activation behind it, in one; optional."""

    def __call__(
        self, weight: Tensor, bias: Tensor | None, activation: GatedActivation
    ) -> PackedLinear:
        """Pack ``weight[2n, in_features]``, gate rows then up rows; once, after loading.

        Returns:
            A product of n outputs: ``act(x @ gate.T) * (x @ up.T)``, each part with its bias and
            rounded as if it was stored.
        """


class SamplingInputs(NamedTuple):
    """Per-row parameters of `Sample`; all ``[num_rows]`` on the device.

    Attributes:
        temperature: float32; 0 marks a greedy row.
        top_k: int32; the vocabulary size or more keeps all.
        top_p: float32; 1 keeps all.
        min_p: float32; 0 keeps all.
        seeds: int64.
        positions: int32, the index that the sampled token will have in its sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


class SamplingHints(NamedTuple):
    """What the host knows about the rows of a `Sample` call, so that work can be left out.

    Hints never change a result, only its cost. They must hold for every row that is not greedy,
    and a captured graph keeps those that it was captured with.

    Attributes:
        top_width: How many of the likeliest tokens decide what top-k and top-p keep: the largest
            ``top_k`` of the rows that have such a filter, the vocabulary size where one has top-p
            alone, and 0 when no row has either.
        has_min_p: Whether any row has a min-p filter.
    """

    top_width: int
    has_min_p: bool


class Sample(Protocol):
    """``sample``: one token per row."""

    def __call__(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        is_all_greedy: bool,
        hints: SamplingHints | None = None,
    ) -> Tensor:
        """Sample each row by its own parameters.

        The filters apply in the order temperature, top-k, top-p, min-p; of equally likely tokens
        at a limit all are kept. A row's result depends on that row, its parameters, seed and
        position alone: not on the other rows, not on where it stands, not on any global generator.

        Args:
            logits: ``[num_rows, vocab_size]`` of any float dtype; not changed.
            inputs: Parameters.
            is_all_greedy: A promise that every temperature is 0, for a shorter path.
            hints: What else is known of all rows; ``None`` for nothing.

        Returns:
            ``[num_rows]`` int32 token ids.
        """


OPS: Mapping[str, type] = {
    "rms_norm": RMSNorm,
    "fused_add_rms_norm": FusedAddRMSNorm,
    "rope": Rope,
    "rope_rows": RopeRows,
    "apply_rope": ApplyRope,
    "silu_and_mul": ActAndMul,
    "gelu_and_mul": ActAndMul,
    "gelu_tanh_and_mul": ActAndMul,
    "embedding": Embedding,
    "store_kv": StoreKV,
    "sample": Sample,
    "qk_norm_rope_store": QKNormRopeStore,
}
"""Every tensor op by name, with its protocol."""

PACKERS = ("pack_linear", "pack_gated_linear")
"""Ops that take a weight once and return a product."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """What a kernel set is built with.

    Attributes:
        device: Where tensors live.
        dtype: Of weights and activations.
        settings: The set's own settings section, or ``None``.
    """

    device: torch.device
    dtype: torch.dtype
    settings: BaseModel | None = None


class KernelSet(ABC):
    """Some of the ops, for one device and dtype. ``factory(config: KernelConfig) -> KernelSet``."""

    @abstractmethod
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Return the ops that this set has, by name (of `OPS` or `PACKERS`).

        An op that would be wrong or slower than the next set's is left out.
        """


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The op that each call site uses; made once at start, then fixed."""

    rms_norm: RMSNorm
    fused_add_rms_norm: FusedAddRMSNorm
    rope: Rope
    silu_and_mul: ActAndMul
    gelu_and_mul: ActAndMul
    gelu_tanh_and_mul: ActAndMul
    embedding: Embedding
    store_kv: StoreKV
    sample: Sample
    qk_norm_rope_store: QKNormRopeStore
    pack_linear: PackLinear
    pack_gated_linear: PackGatedLinear
    rope_rows: RopeRows | None
    """Called once per step for `QKVInputs.rope_rows`; ``None`` where the rotation needs no help."""
    sources: Mapping[str, str]
    """Which set each op came from."""
