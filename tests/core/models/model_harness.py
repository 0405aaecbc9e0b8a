"""Run a model by hand: what the engine does around a forward pass, in its shortest form.

`Runner` builds the context (page table, KV pool, backends), loads a Hugging Face state dict and
computes steps. It keeps each sequence on pages of its own, taken in an order that is no order, so
that a result does not depend on pages that happen to be adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from minisgl.attention.contract import AttentionConfig
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.core import Batch, Context, Req, SamplingParams, StepArrays
from minisgl.distributed.contract import Communicator
from minisgl.kvcache.pool import KVPool, PoolShape
from minisgl.layers.base import LoadTarget
from minisgl.models.config import ModelConfig, normalize_config
from minisgl.models.contract import Model, ModelBuild
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.mistral import MistralForCausalLM
from minisgl.models.mixtral import MixtralForCausalLM
from minisgl.models.qwen2 import Qwen2ForCausalLM
from minisgl.models.qwen3 import Qwen3ForCausalLM
from minisgl.models.qwen3_moe import Qwen3MoeForCausalLM
from minisgl.moe.contract import MoEConfig
from minisgl.moe.torch_backend import TorchMoEBackend
from minisgl.ops.contract import KernelConfig, KernelTable
from minisgl.ops.table import build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet

CPU = torch.device("cpu")
MODELS: dict[str, type[Model]] = {
    cls.__name__: cls
    for cls in (
        LlamaForCausalLM,
        MistralForCausalLM,
        MixtralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
    )
}


class SingleComm(Communicator):
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return payload

    def min_int(self, value: int) -> int:
        return value

    def shutdown(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much room the runner has."""

    page_size: int = 4
    num_reqs: int = 8
    max_seq_len: int = 256


DEFAULT_SIZES = Sizes()


def torch_kernels(dtype: torch.dtype = torch.float32) -> KernelTable:
    return build_kernel_table([("torch", TorchKernelSet(KernelConfig(CPU, dtype)))])


def load(model: Model, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy every target's part; what is absent must be optional or replaced."""
    targets = list(model.load_targets())
    known = {name for name, _ in targets}
    assert set(weights) <= known, f"unexpected: {sorted(set(weights) - known)}"
    replaced = {old for name, target in targets if name in weights for old in target.replaces}
    for name, target in targets:
        if name in weights:
            copy_part(target, weights[name])
        else:
            assert target.is_optional or name in replaced, f"missing: {name}"


def copy_part(target: LoadTarget, whole: torch.Tensor) -> None:
    assert target.shape in ((), tuple(whole.shape))
    if target.dest is not None:
        part = whole[target.index]
        assert part.shape == target.dest.shape
        target.dest.copy_(part)


def build_model(
    config: ModelConfig, comm: Communicator, kernels: KernelTable, max_seq_len: int | None = None
) -> Model:
    build = ModelBuild(config, torch.float32, CPU, kernels, comm, max_seq_len)
    return MODELS[config.architecture](build)  # type: ignore[call-arg]  # an abstract class's type


class Runner:
    """One rank with a loaded model."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        comm: Communicator | None = None,
        sizes: Sizes = DEFAULT_SIZES,
    ) -> None:
        self.comm = comm or SingleComm()
        self.kernels = torch_kernels()
        self.model = build_model(config, self.comm, self.kernels, sizes.max_seq_len)
        load(self.model, weights)
        self.model.finalize()
        self._sizes = sizes
        self._max_pages = -(-sizes.max_seq_len // sizes.page_size)
        self.ctx = self._build_context(config)
        self.reqs: list[Req] = []
        num_pages = sizes.num_reqs * self._max_pages
        shuffled = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        # Every row of the page table is filled at once; real schedulers do it page by page.
        self._host_table = shuffled.reshape(sizes.num_reqs, self._max_pages)
        self.ctx.page_table[: sizes.num_reqs] = torch.from_numpy(self._host_table)

    @classmethod
    def of(cls, hf_model: PreTrainedModel, sizes: Sizes = DEFAULT_SIZES) -> Runner:
        """Take configuration and weights of a Hugging Face model."""
        config = hf_model.config.to_dict() | {"architectures": [type(hf_model).__name__]}
        return cls(normalize_config(config), hf_model.state_dict(), sizes=sizes)

    def add(self, tokens: Sequence[int]) -> Req:
        """Make a request with a row of its own."""
        ids = np.array(tokens, dtype=np.int32)
        req = Req(len(self.reqs), ids, self._sizes.max_seq_len, SamplingParams())
        req.table_idx = len(self.reqs)
        self.reqs.append(req)
        return req

    def prefill(self, reqs: Sequence[Req], num_tokens: int | None = None) -> torch.Tensor:
        """Compute the prompts, or of each the next ``num_tokens``; logits of each last token."""
        for req in reqs:
            end = req.num_tokens if num_tokens is None else req.cached_len + num_tokens
            req.device_len = min(end, req.num_tokens)
        return self._step(Batch(list(reqs), "prefill", [True] * len(reqs)))

    def prefill_unsampled(self, reqs: Sequence[Req]) -> torch.Tensor:
        """Compute the prompts as if more of each were to come."""
        return self._step(Batch(list(reqs), "prefill", [False] * len(reqs)))

    def decode(self, reqs: Sequence[Req], tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each request and compute it."""
        for req, token in zip(reqs, tokens, strict=True):
            req.append_host(token)
            req.device_len = req.num_tokens
        return self._step(Batch(list(reqs), "decode"))

    def _step(self, batch: Batch) -> torch.Tensor:
        self.fill(batch)
        self.ctx.attn_backend.prepare_metadata(batch)
        with torch.inference_mode(), self.ctx.forward_batch(batch):
            logits = self.model.forward()
        for req in batch.reqs:
            req.cached_len = req.device_len
        return logits

    def fill(self, batch: Batch) -> None:
        """Set everything that a forward pass reads."""
        cached = np.array([req.cached_len for req in batch.reqs], dtype=np.int32)
        total = np.array([req.device_len for req in batch.reqs], dtype=np.int32)
        rows = np.array([req.table_idx for req in batch.reqs], dtype=np.int32)
        none = np.empty(0, dtype=np.int32)
        batch.host = StepArrays(rows, cached, total, none, none, none, self._host_table)
        spans = [(req, range(req.cached_len, req.device_len)) for req in batch.reqs]
        positions = np.concatenate([np.array(span) for _, span in spans])
        table_rows = np.repeat(rows, total - cached)
        page = self._sizes.page_size
        slots = self._host_table[table_rows, positions // page] * page + positions % page
        starts = np.concatenate(([0], np.cumsum(total - cached)))
        tokens = np.concatenate([req.tokens[span.start : span.stop] for req, span in spans])
        batch.padded_size = batch.size
        batch.input_ids = torch.from_numpy(tokens)
        batch.positions = torch.from_numpy(positions.astype(np.int32))
        batch.out_loc = torch.from_numpy(slots.astype(np.int64))
        batch.table_idx = torch.from_numpy(rows)
        batch.seq_lens = torch.from_numpy(total)
        batch.cu_seqlens_q = torch.from_numpy(starts.astype(np.int32))
        batch.max_seqlen_q = int((total - cached).max())
        if batch.is_prefill:
            sampled = [
                end - 1 for end, yes in zip(starts[1:], batch.is_sampled, strict=True) if yes
            ]
            batch.sample_rows = torch.tensor(sampled, dtype=torch.int64)

    def _build_context(self, config: ModelConfig) -> Context:
        sizes, model = self._sizes, self.model
        ctx = Context(sizes.page_size)
        num_pages = sizes.num_reqs * self._max_pages
        ctx.kernels, ctx.comm = self.kernels, self.comm
        ctx.kv_pool = KVPool(
            PoolShape(
                config.num_layers, num_pages, sizes.page_size, model.num_kv_heads, model.head_dim
            ),
            torch.float32,
            CPU,
        )
        ctx.page_table = torch.full(
            (sizes.num_reqs + 1, self._max_pages), ctx.kv_pool.dummy_page, dtype=torch.int32
        )
        ctx.attn_backend = TorchAttentionBackend(
            AttentionConfig(
                context=ctx,
                num_qo_heads=model.num_qo_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                dtype=torch.float32,
                device=CPU,
                layers=model.layers_attention,
                max_running_reqs=sizes.num_reqs,
                max_seq_len=sizes.max_seq_len,
            )
        )
        if config.moe is not None:
            ctx.moe_backend = TorchMoEBackend(
                MoEConfig(
                    num_experts=config.moe.num_experts,
                    top_k=config.moe.top_k,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.moe.intermediate_size // self.comm.size,
                    is_renormalized=config.moe.is_renormalized,
                    dtype=torch.float32,
                    device=CPU,
                    max_num_tokens=sizes.max_seq_len * sizes.num_reqs,
                )
            )
        return ctx
