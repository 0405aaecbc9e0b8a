"""What every op should give, written as plainly as possible and computed in float64.

Nothing here is fast. Inputs may have any float dtype and device; results are float64 on the same
device, to be compared within what `TOLERANCES` allows the op and the dtype under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """How far a result may be off, as for ``torch.testing.assert_close``."""

    rtol: float
    atol: float


_ROUNDED: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.float16: Tolerance(4e-3, 4e-3),
    torch.bfloat16: Tolerance(3e-2, 3e-2),
}
"""A few roundings of the type, for values of about 1: of inputs to matrix products, of
probabilities and of the result; in float32 sums of some hundred terms."""

_EXACT: Mapping[torch.dtype, Tolerance] = dict.fromkeys(_ROUNDED, Tolerance(0.0, 0.0))
"""Nothing is computed, only moved."""

TOLERANCES: Mapping[str, Mapping[torch.dtype, Tolerance]] = {
    "attention": _ROUNDED,
    "moe": _ROUNDED,
    "rms_norm": _ROUNDED,
    "fused_add_rms_norm": _ROUNDED,
    "rope": _ROUNDED,
    "apply_rope": _ROUNDED,
    "silu_and_mul": _ROUNDED,
    "gelu_and_mul": _ROUNDED,
    "gelu_tanh_and_mul": _ROUNDED,
    "embedding": _EXACT,
    "store_kv": _EXACT,
    "qk_norm_rope_store": _ROUNDED,
    "pack_linear": _ROUNDED,
    "pack_gated_linear": _ROUNDED,
}
"""How far each op may be off, by the type under test; sampling is compared as a distribution."""


def tolerance(dtype: torch.dtype, op: str = "") -> Tolerance:
    """Return what an op of `TOLERANCES` is allowed; without one, a few roundings."""
    return TOLERANCES.get(op, _ROUNDED)[dtype]


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, rule: str, op: str = ""
) -> None:
    """Compare with a float64 reference.

    Args:
        actual: What a backend gave; has to be of ``dtype``.
        expected: The reference.
        dtype: The type under test.
        rule: What the contract wants, for the message.
        op: Whose tolerance counts; see `TOLERANCES`.
    """
    assert actual.dtype == dtype, f"{rule}: in {dtype}, got {actual.dtype}"
    assert actual.shape == expected.shape, (
        f"{rule}: in shape {list(expected.shape)}, got {list(actual.shape)}"
    )
    rtol, atol = tolerance(dtype, op)
    torch.testing.assert_close(
        actual.double(), expected, rtol=rtol, atol=atol, msg=lambda text: f"{rule}\n{text}"
    )


def attend(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, window_left: int = -1) -> Tensor:
    """Causal attention of one request's newest tokens.

    Args:
        q: ``[n, num_qo_heads, head_dim]`` of the last ``n`` positions.
        k: ``[m, num_kv_heads, head_dim]`` of all ``m`` positions.
        v: The same shape.
        sm_scale: Factor on the scores.
        window_left: Keys before its own that a query sees; -1 for all.

    Returns:
        ``[n, num_qo_heads, head_dim]``.
    """
    q, k, v = q.double(), k.double(), v.double()
    num_groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(num_groups, dim=1)  # [m, num_qo_heads, head_dim]
    v = v.repeat_interleave(num_groups, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * sm_scale
    key_at = torch.arange(len(k), device=q.device)
    query_at = key_at[len(k) - len(q) :].unsqueeze(1)
    is_hidden = key_at > query_at
    if window_left >= 0:
        is_hidden |= key_at < query_at - window_left
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Rotate halves of the first ``rotary_dim`` of heads in ``[num_tokens, heads, head_dim]``."""
    x = x.double()
    half = cos_sin_cache.shape[1] // 2
    rows = cos_sin_cache.double()[positions.long()].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``act(x[..., :n]) * x[..., n:]`` with silu, gelu or gelu_tanh."""
    gate, up = x.double().chunk(2, dim=-1)
    if activation == "silu":
        return gate * gate.sigmoid() * up
    if activation == "gelu":
        return gate * 0.5 * (1 + (gate / 2**0.5).erf()) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * 0.5 * (1 + inner.tanh()) * up


def embedding(ids: Tensor, weight: Tensor, vocab_start: int) -> Tensor:
    """Rows of one part of the vocabulary, zeros for the ids of others."""
    rows = torch.zeros(len(ids), weight.shape[1], dtype=torch.float64, device=weight.device)
    for i, token in enumerate(ids.tolist()):
        if vocab_start <= token < vocab_start + len(weight):
            rows[i] = weight[token - vocab_start].double()
    return rows


class Experts(NamedTuple):
    """Weights and routing of a MoE layer.

    Attributes:
        gate_up_weight: ``[num_experts, 2 * intermediate_size, hidden_size]``.
        down_weight: ``[num_experts, hidden_size, intermediate_size]``.
        top_k: Experts of a token.
        is_renormalized: Whether their weights are scaled to sum to 1.
    """

    gate_up_weight: Tensor
    down_weight: Tensor
    top_k: int
    is_renormalized: bool


def moe(hidden_states: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
    """Compute a MoE layer token by token.

    Args:
        hidden_states: ``[num_tokens, hidden_size]``.
        router_logits: ``[num_tokens, num_experts]``.
        experts: The layer.

    Returns:
        ``[num_tokens, hidden_size]``.
    """
    routing = router_logits.double().softmax(dim=-1)
    result = torch.zeros_like(hidden_states, dtype=torch.float64)
    for token, x in enumerate(hidden_states.double()):
        weights, chosen = routing[token].topk(experts.top_k)
        if experts.is_renormalized:
            weights = weights / weights.sum()
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            inner = act_and_mul(experts.gate_up_weight[expert].double() @ x, "silu")
            result[token] += weight * (experts.down_weight[expert].double() @ inner)
    return result


class Filters(NamedTuple):
    """Sampling parameters of one row; the defaults filter nothing."""

    temperature: float = 1.0
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0


def sampling_weights(logits: Tensor, filters: Filters) -> Tensor:
    """Return the probability with which each token is to be sampled.

    Args:
        logits: ``[vocab_size]``.
        filters: Parameters; a temperature of 0 is greedy.

    Returns:
        ``[vocab_size]``, summing to 1.
    """
    logits = logits.double()
    if filters.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    weights = (logits / filters.temperature).softmax(dim=-1)
    ranked = weights.sort(descending=True).values
    if filters.top_k < len(weights):
        weights = weights.where(weights >= ranked[filters.top_k - 1], 0.0)
        weights = weights / weights.sum()
    if filters.top_p < 1:
        ranked = weights.sort(descending=True).values
        before = ranked.cumsum(dim=-1) - ranked
        num_kept = max(int((before < filters.top_p).sum()), 1)
        weights = weights.where(weights >= ranked[num_kept - 1], 0.0)
    weights = weights.where(weights >= filters.min_p * weights.max(), 0.0)
    return weights / weights.sum()
