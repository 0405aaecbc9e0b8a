"""What probes want to know of a model; apart from its neighbours because it imports torch."""

from __future__ import annotations

from dataclasses import replace

from minisgl.models.read import read_model_config
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ProbeContext
from minisgl.weights.dtype import resolve_dtype
from minisgl.weights.resolve import open_model


def describe_model(plugins: PluginManager, model: str, context: ProbeContext) -> ProbeContext:
    """Add a model's head sizes, windows and dtype to a probe context.

    Raises:
        ModelError: The model cannot be opened, or is of no kind that we run.
    """
    files = open_model(model, "auto", plugins)
    config = read_model_config(files.config, plugins)
    dtype = resolve_dtype(files.config, "auto", context.device)
    return replace(
        context,
        dtype=str(dtype).removeprefix("torch."),
        head_dim=config.head_dim,
        num_qo_heads=config.num_qo_heads,
        num_kv_heads=config.num_kv_heads,
        has_sliding_window=any(window is not None for window in config.windows),
    )
