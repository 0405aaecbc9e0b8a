"""The kernel set ``torch``: every op in plain PyTorch, for any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minisgl.ops import torch_ops
from minisgl.ops.contract import KernelConfig, KernelSet
from minisgl.ops.cpu_linear import pack_linear
from minisgl.ops.sampling import sample


class TorchKernelSet(KernelSet):
    """Offers every op, so that it can end any chain.

    ``qk_norm_rope_store`` is left to the table, which composes it of the best parts of the chain.
    """

    def __init__(self, config: KernelConfig) -> None:
        """Need nothing: every function looks at the device and dtype of its tensors."""
        del config

    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Return the functions of `minisgl.ops.torch_ops` and the sampler."""
        return {
            "rms_norm": torch_ops.rms_norm,
            "fused_add_rms_norm": torch_ops.fused_add_rms_norm,
            "rope": torch_ops.rope,
            "rope_rows": torch_ops.rope_rows,
            "apply_rope": torch_ops.apply_rope,
            "silu_and_mul": torch_ops.silu_and_mul,
            "gelu_and_mul": torch_ops.gelu_and_mul,
            "gelu_tanh_and_mul": torch_ops.gelu_tanh_and_mul,
            "embedding": torch_ops.embedding,
            "store_kv": torch_ops.store_kv,
            "sample": sample,
            "pack_linear": pack_linear,
        }
