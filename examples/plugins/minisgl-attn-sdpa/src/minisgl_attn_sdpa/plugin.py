"""What this distribution registers: attention ``sdpa``."""

from __future__ import annotations

from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec, ProbeContext
from minisgl_attn_sdpa.settings import SdpaSettings


def probe(context: ProbeContext) -> Availability:
    """Work everywhere, and stand behind the core's own reference."""
    return Availability(ok=True, priority=-10)


ATTENTION = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_attn_sdpa.backend:SdpaBackend",
    summary="one padded call of scaled_dot_product_attention per batch",
    settings=SdpaSettings,
    probe=probe,
)
