"""What this distribution registers: attention ``fa``."""

from __future__ import annotations

from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec, Capabilities, ProbeContext
from minisgl_attn_fa.generations import DTYPES, HEAD_DIMS, choose
from minisgl_attn_fa.settings import FlashAttentionSettings


def probe_attention(context: ProbeContext) -> Availability:
    """Say whether a FlashAttention that fits this GPU is installed, and what it can do."""
    choice = choose(context)
    if choice.generation is None or context.sm is None:
        return Availability(ok=False, reason=choice.reason)
    return Availability(
        ok=True,
        reason=choice.reason,
        priority=choice.generation.priority(context.phase, context.sm),
        capabilities=choice.generation.capabilities(context.sm),
    )


ATTENTION = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_attn_fa.backend:FlashAttentionBackend",
    summary="FlashAttention 2, 3 or 4, NVIDIA GPUs from Ampere on",
    aliases=("flashattention",),
    settings=FlashAttentionSettings,
    probe=probe_attention,
    # The widest; what the installed generation can do is in the probe's answer.
    capabilities=Capabilities(dtypes=DTYPES, head_dims=HEAD_DIMS),
)
