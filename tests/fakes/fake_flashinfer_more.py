"""The parts of FlashInfer that our plugins do not call, for those who try them: the plan-less
trtllm attention, sampling and fused MoE, with their refusals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fakes.fake_paged import Mask, attend, read_pages, require, require_i32

Amount = float | int | Tensor
Seed = int | Tensor | None


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    kv_layout: str = "HND",
    sinks: list[Tensor] | None = None,
) -> Tensor:
    """There is no default scale: ``bmm1_scale`` is all of it."""
    require_i32(block_tables, "block_tables")
    require_i32(seq_lens, "seq_lens")
    require(workspace_buffer.dtype == torch.uint8, "the workspace is uint8")
    pair = kv_cache if isinstance(kv_cache, tuple) else (kv_cache[:, 0], kv_cache[:, 1])
    k, v = (c.transpose(1, 2) if kv_layout == "HND" else c for c in pair)
    require(k.shape[1] in (16, 32, 64), f"page size {k.shape[1]}: 16, 32 and 64 are allowed")
    require(int(seq_lens.max()) <= max_seq_len, "max_seq_len is too small")
    mask = Mask(bmm1_scale, window_left=window_left)
    rows = []
    for row, length in enumerate(seq_lens.tolist()):
        keys, values = (read_pages(c, block_tables[row], length) for c in (k, v))
        sink = sinks[0] if sinks else None
        rows.append(attend(query[row : row + 1], keys, values, mask, sink)[0] * bmm2_scale)
    return torch.cat(rows).to(query.dtype)


def softmax(logits: Tensor, temperature: Amount | None = None) -> Tensor:
    _check_rows(logits, {"temperature": temperature})
    scale = 1.0 if temperature is None else temperature
    column = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
    return torch.softmax(logits.float() / column, dim=-1)


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Amount,
    top_p: Amount,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    generator: torch.Generator | None = None,
    seed: Seed = None,
    offset: Seed = None,
) -> Tensor:
    """Sample one token per row; the row's index is part of the random stream."""
    _check_rows(probs, {"top_k": top_k, "top_p": top_p})
    require(filter_apply_order in ("top_k_first", "joint"), "unknown filter_apply_order")
    require(bool((torch.as_tensor(top_k) > 0).all()), "top_k must be above 0: -1 and 0 are not off")
    is_same_kind = isinstance(seed, Tensor) == isinstance(offset, Tensor)
    require(is_same_kind, "seed and offset are both tensors or both integers")
    if isinstance(seed, int):
        generator = torch.Generator().manual_seed(seed)
    rows = probs if indices is None else probs[indices.long()]
    order = rows.sort(dim=-1, descending=True)
    rank = torch.arange(rows.shape[1])
    kept = rank < torch.as_tensor(top_k).reshape(-1, 1)
    values = order.values * kept
    if filter_apply_order == "top_k_first":
        values = values / values.sum(-1, keepdim=True)
    kept = values.cumsum(-1) - values < torch.as_tensor(top_p).reshape(-1, 1)
    picked = torch.multinomial(values * kept, 1, generator=generator)
    return order.indices.gather(1, picked).flatten().to(torch.int32)


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    output: Tensor | None = None,
    ep_size: int = 1,
    ep_rank: int = 0,
) -> list[Tensor]:
    """Rows of ``fc1`` are the up projection first, then the gate; the result is in ``output``."""
    require_i32(token_selected_experts, "token_selected_experts")
    require(token_final_scales.dtype == torch.float32, "token_final_scales must be float32")
    require(isinstance(quant_scales, list), "quant_scales must be a list", TypeError)
    require(fc1_expert_weights.is_contiguous(), "fc1 must be contiguous")
    require(fc1_expert_weights.dtype == input.dtype, "weights and input differ in dtype")
    shape = (input.shape[0], fc2_expert_weights.shape[1])
    result = torch.zeros(shape, dtype=output_dtype) if output is None else output
    require(tuple(result.shape) == shape, "output must be [tokens, hidden]")
    require(result.dtype == output_dtype, "output must be of output_dtype")
    num_local = fc1_expert_weights.shape[0]
    total = torch.zeros(shape, dtype=torch.float32)
    for token, experts in enumerate(token_selected_experts.tolist()):
        for slot, expert in enumerate(experts):
            local = expert - ep_rank * num_local
            require(0 <= expert < num_local * ep_size, "an expert id is out of range")
            if 0 <= local < num_local:
                up, gate = (fc1_expert_weights[local].float() @ input[token].float()).chunk(2)
                hidden = fc2_expert_weights[local].float() @ (F.silu(gate) * up)
                total[token] += hidden * token_final_scales[token, slot]
    result.copy_(total)
    return [result]


def _check_rows(rows: Tensor, amounts: dict[str, Amount | None]) -> None:
    require(rows.dim() == 2, "logits and probabilities are two-dimensional")
    for name, amount in amounts.items():
        require(not isinstance(amount, bool), f"{name} must be a number", TypeError)
        if isinstance(amount, Tensor):
            require(amount.shape == rows.shape[:1], f"{name} must have one entry per row")
            is_int = amount.dtype == torch.int32
            require(is_int == (name == "top_k"), f"{name} has the wrong dtype {amount.dtype}")
