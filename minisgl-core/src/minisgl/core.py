"""The types that everything else speaks of: SamplingParams, Req, Batch and Context.

A model's ``forward()`` takes no arguments: the batch that is being computed, the page table, the
KV pool and the backends hang off the `Context` that is active inside ``ctx.forward_batch(batch)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minisgl.plugin.spec import Phase
from minisgl.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minisgl.attention.contract import AttentionBackend
    from minisgl.distributed.contract import Communicator
    from minisgl.kvcache.contract import CacheHandle
    from minisgl.kvcache.pool import KVPool
    from minisgl.moe.contract import MoEBackend
    from minisgl.ops.contract import KernelTable

__all__ = ["Batch", "Context", "Req", "SamplingParams", "StepArrays", "get_global_ctx"]


class Req:
    """One sequence that is being generated; the scheduler owns and changes it.

    Lengths count tokens and always hold ``cached_len < device_len <= max_device_len``:

    * ``cached_len``: tokens whose KV is in the pool (or will be, once the launched steps ran);
    * ``device_len``: tokens that exist on the device, the newest sampled one included; under
      overlap the host may not have seen that one yet;
    * ``max_device_len``: where generation ends by length.
    """

    __slots__ = (
        "uid",
        "tokens",
        "num_tokens",
        "prompt_len",
        "table_idx",
        "cached_len",
        "device_len",
        "max_device_len",
        "sampling_params",
        "cache_handle",
        "num_cached_prompt_tokens",
        "num_scored",
    )

    def __init__(
        self, uid: int, prompt_ids: np.ndarray, max_device_len: int, sampling_params: SamplingParams
    ) -> None:
        """Make a request that waits.

        Args:
            uid: Number that names the request in every message.
            prompt_ids: ``[prompt_len]`` int32 token ids, at least one; copied.
            max_device_len: Prompt and generated tokens together, at most.
            sampling_params: How to sample; never changed.
        """
        self.uid = uid
        self.prompt_len = len(prompt_ids)
        self.tokens = np.empty(max_device_len, dtype=np.int32)
        self.tokens[: self.prompt_len] = prompt_ids
        self.num_tokens = self.prompt_len  # tokens that the host has seen
        self.table_idx = -1
        self.cached_len = 0
        self.device_len = self.prompt_len
        self.max_device_len = max_device_len
        self.sampling_params = sampling_params
        self.cache_handle: CacheHandle | None = None
        self.num_cached_prompt_tokens = 0
        self.num_scored = 1  # prompt tokens whose log-probabilities are known; the first has none

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens that the host has seen, ``[num_tokens]`` int32; a view."""
        return self.tokens[: self.num_tokens]

    @property
    def output_ids(self) -> np.ndarray:
        """The generated tokens that the host has seen, ``[num_output_tokens]`` int32; a view."""
        return self.tokens[self.prompt_len : self.num_tokens]

    @property
    def extend_len(self) -> int:
        """Tokens that the next step has to compute."""
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        """Tokens that may still be generated."""
        return self.max_device_len - self.device_len

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        wanted = self.sampling_params.prompt_logprobs
        return wanted is not None and self.num_scored < self.prompt_len

    def complete_one(self) -> None:
        """Account for a launched step that samples one token."""
        self.cached_len = self.device_len
        self.device_len += 1

    def append_host(self, token_id: int) -> None:
        """Record a sampled token once the host has seen it."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def __repr__(self) -> str:
        """Show what matters when debugging a schedule."""
        return (
            f"Req(uid={self.uid}, row={self.table_idx}, cached={self.cached_len}, "
            f"device={self.device_len}, max={self.max_device_len})"
        )


@dataclass(slots=True)
class StepArrays:
    """What the scheduler decided for one step, as host arrays; all int32.

    Made once per step by the scheduler and read by the engine and by attention backends that plan
    on the host. ``num_reqs`` counts the real requests, without padding.

    Attributes:
        table_idx: ``[num_reqs]`` rows of the page table and token pool.
        cached_lens: ``[num_reqs]`` tokens before the first one that this step computes.
        seq_lens: ``[num_reqs]`` tokens after this step, so ``seq_lens - cached_lens`` are computed.
        page_rows: ``[num_new_pages]`` row of each page-table entry that changed since the step
            before: pages given out, found in the cache, or replaced by the cache's copy. No place
            occurs twice.
        page_cols: ``[num_new_pages]`` its column.
        page_ids: ``[num_new_pages]`` the page.
        page_table: ``[num_rows, max_pages]`` the host page table itself; a live view, already
            holding the new pages.
    """

    table_idx: np.ndarray
    cached_lens: np.ndarray
    seq_lens: np.ndarray
    page_rows: np.ndarray
    page_cols: np.ndarray
    page_ids: np.ndarray
    page_table: np.ndarray


@dataclass(slots=True)
class Batch:
    """The requests of one step; filled by the scheduler, then by the engine.

    Attributes:
        reqs: Requests in row order.
        phase: ``"prefill"`` (any number of tokens per request) or ``"decode"`` (one each).
        is_sampled: Prefill only, one flag per request: False for a chunk that is not its
            prompt's last, which samples nothing.
        host: The scheduler's arrays.
        padded_size: Rows that the device tensors have; above ``len(reqs)`` only in decode, where
            a captured graph has a fixed size. Padding rows have length 1 on a dummy page.
        input_ids: ``[num_tokens]`` int32 on the device.
        positions: ``[num_tokens]`` int32.
        out_loc: ``[num_tokens]`` int64; slot ``page * page_size + offset`` that takes each
            token's KV.
        table_idx: ``[padded_size]`` int32.
        seq_lens: ``[padded_size]`` int32.
        cu_seqlens_q: ``[padded_size + 1]`` int32; ``arange`` in decode.
        max_seqlen_q: Most query tokens of one request.
        sample_rows: Prefill only: ``[num_sampled]`` int64 rows of the last positions whose
            logits are wanted, in request order.
        attn_metadata: Whatever the attention backend's ``prepare_metadata`` left for itself.
    """

    reqs: list[Req]
    phase: Phase
    is_sampled: list[bool] = field(default_factory=list)
    host: StepArrays | None = None
    padded_size: int = 0
    input_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    out_loc: torch.Tensor | None = None
    table_idx: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 1
    sample_rows: torch.Tensor | None = None
    attn_metadata: Any = None  # each attention backend keeps its own type here

    @property
    def size(self) -> int:
        """Number of requests, padding not counted."""
        return len(self.reqs)

    @property
    def is_prefill(self) -> bool:
        """Whether this batch computes prompt tokens."""
        return self.phase == "prefill"

    @property
    def is_decode(self) -> bool:
        """Whether this batch computes one token of each request."""
        return self.phase == "decode"


class Context:
    """Everything that a model's layers need and do not own; one per engine.

    The engine fills the attributes once at start, in the order of its construction, and never
    replaces them afterwards (captured graphs hold on to the tensors).

    Attributes:
        page_size: Tokens of one KV page.
        page_table: ``[num_rows + 1, max_pages]`` int32 page numbers on the device; the last row is
            the padding row, all on the dummy page.
        token_pool: ``[num_rows + 1, max_seq_len]`` int32 on the device: each sampled token, at its
            place in the sequence, for the decode step that reads it. Prompts come from the host;
            in the pool are only those whose tokens are penalised.
        kernels: The op table.
        comm: The collectives of this rank's tensor-parallel group.
        kv_pool: The paged KV pool.
        attn_backend: Attention; decides by the batch's phase.
        moe_backend: Mixture of experts, for models that have one.
    """

    kernels: KernelTable
    comm: Communicator
    kv_pool: KVPool
    attn_backend: AttentionBackend
    moe_backend: MoEBackend
    page_table: torch.Tensor
    token_pool: torch.Tensor

    def __init__(self, page_size: int) -> None:
        """Make an empty context; the engine fills it."""
        self.page_size = page_size
        self._batch: Batch | None = None
        self._covered_backend: AttentionBackend | None = None  # the own one, behind a stand-in

    @property
    def batch(self) -> Batch:
        """The batch being computed; only inside `forward_batch`."""
        assert self._batch is not None, "no batch is active: use ctx.forward_batch(batch)"
        return self._batch

    @contextmanager
    def forward_batch(
        self, batch: Batch, attn_backend: AttentionBackend | None = None
    ) -> Iterator[None]:
        """Make this context the global one, and ``batch`` its batch, for the duration.

        Blocks do not nest.

        Args:
            batch: What the model will compute.
            attn_backend: Stands in for the context's own, while a step is cut at its attention.
        """
        self._leave_batch()  # Ctrl-C may have come in the midst of leaving the last one
        token = _ACTIVE.set(self)
        try:
            self._batch = batch
            if attn_backend is not None:
                self._covered_backend = self.attn_backend
                self.attn_backend = attn_backend
            yield
            assert self._batch is batch, "forward_batch does not nest"
        finally:
            self._leave_batch()
            _ACTIVE.reset(token)

    def _leave_batch(self) -> None:
        """Be without a batch; may be interrupted at any line and called again."""
        if self._covered_backend is not None:
            self.attn_backend = self._covered_backend
            self._covered_backend = None
        self._batch = None

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this context the global one without a batch, while a model is being built."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


# A context variable, not a plain global, so that two engines in one process, or an engine in a
# thread, each see their own.
_ACTIVE: ContextVar[Context] = ContextVar("minisgl_context")


def get_global_ctx() -> Context:
    """Return the active context.

    Raises:
        LookupError: No context is active in this thread.
    """
    return _ACTIVE.get()
