"""The MoE backend ``torch``: tokens grouped by expert, one pair of products per expert in use."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.moe.contract import MoEBackend, MoEConfig

# Up to so many tokens a device other than a CPU lets every expert compute every token.
_MAX_DENSE_TOKENS = 64


class TorchMoEBackend(MoEBackend):
    """The reference, for any device and dtype.

    The tokens are sorted by expert, and each expert that has any multiplies its own. The host has
    to know how many those are, which on a GPU means to wait for it and cannot be captured. So a
    decode step there lets every expert multiply all tokens, most of them weighted by zero; the
    weights, which bound such a step, are read once either way.
    """

    def __init__(self, config: MoEConfig) -> None:
        """Keep the routing parameters."""
        self._top_k = config.top_k
        self._is_renormalized = config.is_renormalized
        self._is_host = config.device.type == "cpu"

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one MoE layer; see the contract."""
        weights, experts = route(router_logits, self._top_k, self._is_renormalized)
        compute = _grouped_by_expert if self._is_grouped(len(experts)) else _all_experts
        return compute(hidden_states, weights, experts, gate_up_weight, down_weight)

    def _is_grouped(self, num_tokens: int) -> bool:
        """Whether to let each expert compute only its own tokens."""
        if self._is_host:
            return True
        return num_tokens > _MAX_DENSE_TOKENS and not torch.cuda.is_current_stream_capturing()


def route(
    router_logits: torch.Tensor, top_k: int, is_renormalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts.

    Args:
        router_logits: ``[num_tokens, num_experts]``.
        top_k: Experts of a token.
        is_renormalized: Whether their weights are scaled to sum to 1.

    Returns:
        Weights ``[num_tokens, top_k]`` float32 and expert ids ``[num_tokens, top_k]`` int64.
    """
    weights, experts = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if is_renormalized:
        weights /= weights.sum(dim=-1, keepdim=True)
    return weights, experts


def _grouped_by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
) -> torch.Tensor:
    """Let each expert compute the tokens that chose it."""
    num_tokens, top_k = experts.shape
    order = experts.flatten().argsort(stable=True)  # slots (token, choice) by expert
    counts = torch.bincount(experts.flatten(), minlength=gate_up_weight.shape[0]).tolist()
    gathered = x.index_select(0, order // top_k)  # [num_tokens * top_k, hidden_size]
    by_expert = torch.empty_like(gathered)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            end = start + count
            by_expert[start:end] = _expert(
                gathered[start:end], gate_up_weight[expert], down_weight[expert]
            )
            start = end
    # Back in slot order each token's results are adjacent, and are summed in the order of choice
    # whoever else is in the batch.
    results = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
    results = results.view(num_tokens, top_k, x.shape[1])
    return (results * weights.to(x.dtype).unsqueeze(2)).sum(dim=1)


def _all_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
) -> torch.Tensor:
    """Let every expert compute every token, and weight what was not chosen by zero."""
    num_experts = gate_up_weight.shape[0]
    dense = torch.zeros(x.shape[0], num_experts, dtype=torch.float32, device=x.device)
    dense = dense.scatter_(1, experts, weights).to(x.dtype)  # [num_tokens, num_experts]
    y = torch.zeros_like(x)
    for expert in range(num_experts):
        result = _expert(x, gate_up_weight[expert], down_weight[expert])
        y.addcmul_(result, dense[:, expert : expert + 1])
    return y


def _expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Compute one expert's SwiGLU for ``[n, hidden_size]``."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate).mul_(up), down)
