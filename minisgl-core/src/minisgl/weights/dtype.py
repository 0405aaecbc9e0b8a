"""Which dtype a model computes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minisgl.errors import ModelError, SettingsError

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
_ALLOWED = "auto, float32, float16 or bfloat16"


def resolve_dtype(
    config: Mapping[str, Any],  # free-form JSON
    requested: str | torch.dtype = "auto",
    device_type: str = "cpu",
) -> torch.dtype:
    """Return the dtype of weights and activations.

    Args:
        config: The content of ``config.json``; says ``dtype``, or ``torch_dtype`` as transformers
            4 spelled it, or neither.
        requested: What the user asked for; ``auto`` is the checkpoint's own dtype. Where that is
            unknown it is float32 on a CPU and bfloat16 elsewhere.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        SettingsError: ``requested`` is not a dtype that we compute in.
        ModelError: The checkpoint's is not, and the user asked for no other.
    """
    if isinstance(requested, torch.dtype):
        requested = str(requested)
    if requested != "auto":
        dtype = _DTYPES.get(requested.removeprefix("torch."))
        if dtype is None:
            raise SettingsError(f"--dtype {requested}: must be {_ALLOWED}")
        return dtype
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored is None:
        return torch.float32 if device_type == "cpu" else torch.bfloat16
    dtype = _DTYPES.get(str(stored).removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"config.json: dtype {stored!r} cannot be computed in; --dtype {_ALLOWED}")
    return dtype
