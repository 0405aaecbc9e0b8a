"""What this distribution registers: kernel set, collectives and attention ``cuda``."""

from __future__ import annotations

from importlib.util import find_spec

from minisgl.plugin.spec import (
    PLUGIN_API,
    Availability,
    BackendSpec,
    Capabilities,
    ProbeContext,
)
from minisgl_kernels_cuda.settings import CudaKernelSettings, has_nccl, has_nvrtc

# Before FlashInfer's set: every op here was measured to be at least as quick, see the README.
PRIORITY = 30
# Before FlashInfer's decode (50) where it was measured to be quicker (python -m
# benchmarks.gpu_decode), and behind every library on other architectures.
ATTENTION_PRIORITY = 10
MEASURED_PRIORITY = {90: 60}
# Before every library where pages, or what divides them evenly, have four tokens and more; with
# smaller ones FlashInfer (40) was quicker (python -m benchmarks.gpu_attention --phase prefill).
PREFILL_PRIORITY = 70
SMALL_PAGES_PRIORITY = 20
MIN_FAST_PAGE = 4
MIN_SM = 80
PREFILL_SM = 90
PREFILL_DTYPES = ("float16", "bfloat16")
MAX_PREFILL_RATIO = 128  # query heads per KV head: rows of a block
DTYPES = ("float16", "bfloat16", "float32")


def probe(context: ProbeContext) -> Availability:
    """Say whether the kernels can be compiled and run here."""
    reason = _obstacle(context)
    if reason:
        return Availability(ok=False, reason=reason)
    return Availability(ok=True, reason="cuda-core and NVRTC found", priority=PRIORITY)


def _obstacle(context: ProbeContext) -> str:
    """Return what is in the way, or nothing."""
    if context.device != "cuda" or context.sm is None:
        return "needs an NVIDIA GPU of compute capability 8.0 or up"
    if context.sm < MIN_SM:
        return f"needs compute capability 8.0 or up, this GPU has {context.sm / 10}"
    if context.dtype not in DTYPES:
        return f"serves {', '.join(DTYPES)}, the model is {context.dtype}"
    if not _has_cuda_core():
        return "package cuda-core is not installed: pip install 'cuda-core[cu13]'"
    if not has_nvrtc():
        return (
            "NVRTC is not installed: pip install nvidia-cuda-nvrtc, or set CUDA_HOME to a CUDA "
            "toolkit"
        )
    return ""


def _has_cuda_core() -> bool:
    """Look without importing it; ``cuda`` itself is a namespace of several distributions."""
    return find_spec("cuda") is not None and find_spec("cuda.core") is not None


KERNELS = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_kernels_cuda.backend:CudaKernelSet",
    summary="our own kernels, compiled at first use; NVIDIA GPUs from Ampere on",
    settings=CudaKernelSettings,
    probe=probe,
)


def probe_comm(context: ProbeContext) -> Availability:
    """Say whether the collectives can be had; whether GPUs reach each other shows at the start."""
    reason = _obstacle(context)
    if reason:
        return Availability(ok=False, reason=reason)
    if not has_nccl():
        return Availability(ok=False, reason="NCCL is not installed: pip install nvidia-nccl-cu13")
    if context.tp_size == 1:
        return Availability(ok=True, reason="one rank has nobody to talk to", priority=-1)
    return Availability(ok=True, reason="NCCL and NVRTC found", priority=PRIORITY)


COMM = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_kernels_cuda.comm:build_communicator",
    summary="NCCL, and our own kernels for small messages over peer memory",
    settings=CudaKernelSettings,
    probe=probe_comm,
)


# What every GPU has that is served; one of PREFILL_SM has more, which is in the probe's answer.
DECODE_ONLY = Capabilities(phases=("decode",), dtypes=DTYPES, head_dims=(64, 128))
BOTH_PHASES = Capabilities(dtypes=PREFILL_DTYPES, head_dims=(64, 128))


def probe_attention(context: ProbeContext) -> Availability:
    """Say whether attention can be compiled and run here, and for which phases."""
    reason = _obstacle(context)
    if reason:
        return Availability(ok=False, reason=reason)
    can_prefill = _can_prefill(context)
    if context.phase == "prefill" and not can_prefill:
        return Availability(
            ok=False,
            reason="prefill needs compute capability 9.0, float16 or bfloat16, and at most "
            f"{MAX_PREFILL_RATIO} query heads per KV head; name another backend for it, as in "
            "--attn fi,cuda",
        )
    return Availability(
        ok=True,
        reason="cuda-core and NVRTC found",
        priority=_prefill_priority(context)
        if context.phase == "prefill"
        else _decode_priority(context),
        capabilities=BOTH_PHASES if can_prefill else DECODE_ONLY,
    )


def _can_prefill(context: ProbeContext) -> bool:
    ratio = (context.num_qo_heads or 1) / (context.num_kv_heads or 1)
    is_served = context.dtype in PREFILL_DTYPES and ratio <= MAX_PREFILL_RATIO
    return context.sm == PREFILL_SM and is_served


def _decode_priority(context: ProbeContext) -> int:
    return MEASURED_PRIORITY.get(context.sm or 0, ATTENTION_PRIORITY)


def _prefill_priority(context: ProbeContext) -> int:
    page_size = context.page_size or MIN_FAST_PAGE  # not chosen yet: the usual one is larger
    return SMALL_PAGES_PRIORITY if page_size % MIN_FAST_PAGE else PREFILL_PRIORITY


ATTENTION = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_kernels_cuda.attention:build_attention",
    summary="our own attention, compiled at first use; decode on NVIDIA GPUs from Ampere on, "
    "prefill on Hopper",
    settings=CudaKernelSettings,
    probe=probe_attention,
    capabilities=DECODE_ONLY,
)
