"""The kernel set ``cuda``: which ops it offers for a dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from minisgl.ops.contract import KernelConfig, KernelSet
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.linear import LinearKernels
from minisgl_kernels_cuda.memory import RowMoves
from minisgl_kernels_cuda.norm import Norms
from minisgl_kernels_cuda.qkv import QKVStage
from minisgl_kernels_cuda.sampling import Sampler
from minisgl_kernels_cuda.settings import CudaKernelSettings, cache_folder
from minisgl_kernels_cuda.units import DeviceSize, Loader

_Op = Callable[..., Any]  # ops have different signatures; the table's fields give each its own

# Products of float32 stay with the library: the tensor cores would round their inputs.
_LINEAR_DTYPES = (torch.float16, torch.bfloat16)


class CudaKernelSet(KernelSet):
    """Offers its ops on a CUDA device; all are compiled and loaded when it is made."""

    def __init__(self, config: KernelConfig) -> None:
        """Compile what is not in the cache, and load it.

        Raises:
            PluginError: NVRTC is missing or refuses, or the dtype is not served.
        """
        settings = config.settings
        if not isinstance(settings, CudaKernelSettings):
            settings = CudaKernelSettings()
        size = device_size(config.device)
        compiler = Compiler(size.arch, cache_folder(settings.cache_dir))
        has_pdl = torch.cuda.get_device_capability(config.device) >= (9, 0)
        loader = DeviceLoader(config.device, compiler, has_pdl and settings.pdl != "off")
        self._ops = build_ops(loader, config.dtype, size, settings)

    def ops(self) -> Mapping[str, _Op]:
        """Return the ops; products only in float16 and bfloat16."""
        return self._ops


def build_ops(
    loader: Loader, dtype: torch.dtype, device: DeviceSize, settings: CudaKernelSettings
) -> dict[str, _Op]:
    """Load every op of a dtype.

    Args:
        loader: Where kernels come from.
        dtype: Of weights and activations.
        device: That they run on.
        settings: The user's.
    """
    norms, moves, activations = (
        Norms(loader, dtype),
        RowMoves(loader),
        build_activations(loader, dtype),
    )
    ops: dict[str, _Op] = {
        "rms_norm": norms.rms_norm,
        "fused_add_rms_norm": norms.fused_add_rms_norm,
        "embedding": moves.embedding,
        "store_kv": moves.store_kv,
        "qk_norm_rope_store": QKVStage(loader, dtype).qk_norm_rope_store,
        "sample": Sampler(loader, dtype).sample,
        **activations,
    }
    uses_many = settings.linear_many != "off"
    if dtype in _LINEAR_DTYPES and (settings.linear_rows or uses_many):
        kernels = LinearKernels(loader, dtype, device, settings.linear_rows, activations, uses_many)
        ops["pack_linear"] = kernels.pack_linear
        ops["pack_gated_linear"] = kernels.pack_gated_linear
    return ops
