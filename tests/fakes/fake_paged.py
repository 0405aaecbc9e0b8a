"""What the fake attention libraries share: checks, and the true result in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise as the library would."""
    if not condition:
        raise error(message)


def require_i32(tensor: Tensor, name: str, device: torch.device | None = None) -> None:
    """Check an index tensor: int32, one-dimensional or a table, on the device."""
    require(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}", RuntimeError)
    if device is not None:
        require(tensor.device == device, f"{name} must be on {device}", RuntimeError)


def require_no_overlap(out: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Check that an output shares no memory with inputs."""
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for tensor in inputs:
        begin = tensor.data_ptr()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        is_apart = begin + span * tensor.element_size() <= start or begin >= end
        require(is_apart, "out may not alias q, k or v")


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees, and how scores are scaled.

    Attributes:
        sm_scale: Factor on the scores.
        is_causal: Bottom-right aligned causal mask.
        window_left: Keys before the query's own position; -1 for all.
        soft_cap: 0 is off.
    """

    sm_scale: float
    is_causal: bool = True
    window_left: int = -1
    soft_cap: float = 0.0


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with one request.

    Args:
        q: ``[nq, num_qo_heads, head_dim]``, the last positions of the request.
        k: ``[nk, num_kv_heads, head_dim]``.
        v: Like ``k``.
        mask: Which keys are seen.
        sinks: ``[num_qo_heads]`` logits added to each denominator.

    Returns:
        ``[nq, num_qo_heads, head_dim]`` float32 and the natural log-sum-exp ``[nq, num_qo_heads]``.
    """
    nq, num_heads, _ = q.shape
    nk = k.shape[0]
    group = num_heads // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), keys) * mask.sm_scale
    if mask.soft_cap > 0:
        scores = mask.soft_cap * torch.tanh(scores / mask.soft_cap)
    position = torch.arange(nq).unsqueeze(1) + (nk - nq)
    key = torch.arange(nk)
    hidden = torch.zeros(nq, nk, dtype=torch.bool)
    if mask.is_causal:
        hidden |= key > position
    if mask.window_left >= 0:
        hidden |= key < position - mask.window_left
    scores = scores.masked_fill(hidden.unsqueeze(1).to(q.device), float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, num_heads, 1).expand(nq, num_heads, 1)
        scores = torch.cat((scores, sink), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)  # rows that see nothing: 0
    return torch.einsum("qhk,khd->qhd", weights[..., :nk], values), lse


def read_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Return ``[length, num_kv_heads, head_dim]`` of ``[num_pages, page_size, …]``."""
    page_ids = pages.long()
    in_pool = bool(((page_ids >= 0) & (page_ids < cache.shape[0])).all())
    require(in_pool, "a page number is outside the pool", RuntimeError)
    return cache[page_ids].flatten(0, 1)[:length]


def default_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale that the libraries take when none is given."""
    return 1.0 / math.sqrt(head_dim) if scale is None else scale
