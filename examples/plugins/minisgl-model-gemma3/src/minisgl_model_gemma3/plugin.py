"""What this distribution registers: the architecture ``Gemma3ForCausalLM``."""

from __future__ import annotations

from minisgl.plugin.spec import PLUGIN_API, BackendSpec
from minisgl_model_gemma3.config_json import adapt_config

GEMMA3 = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_model_gemma3.backend:Gemma3ForCausalLM",
    summary="Gemma 3, text only",
    adapt_config=adapt_config,
)
