"""What this distribution registers: attention ``fi`` and kernel set ``fi``."""

from __future__ import annotations

from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec, Capabilities, ProbeContext
from minisgl_attn_flashinfer.modules import (
    DISTRIBUTION,
    AttentionKind,
    Installation,
    attention_module,
    find_installation,
)
from minisgl_attn_flashinfer.settings import FlashInferSettings

# On Hopper FlashInfer decodes at 90 % of the memory bandwidth whatever the page size and splits
# long sequences over idle SMs, which FlashAttention 4 does not; prefill is quicker there.
DECODE_PRIORITY = 50
PREFILL_PRIORITY = 40
KERNELS_PRIORITY = 20

CAPABILITIES = Capabilities(dtypes=("float16", "bfloat16"), head_dims=(64, 128, 256))


def probe_attention(context: ProbeContext) -> Availability:
    """Say whether FlashInfer can attend here."""
    found = _find(context)
    if isinstance(found, Availability):
        return found
    missing = _missing_attention_module(context, found)
    if missing:
        return Availability(ok=False, reason=missing)
    priority = PREFILL_PRIORITY if context.phase != "decode" else DECODE_PRIORITY
    return Availability(ok=True, reason=_describe(found), priority=priority)


def probe_kernels(context: ProbeContext) -> Availability:
    """Say whether FlashInfer's norms, rope and activations can run here."""
    found = _find(context)
    if isinstance(found, Availability):
        return found
    if not found.can_compile and not found.has_module("norm"):
        return Availability(ok=False, reason=_no_compiler("norm"))
    return Availability(ok=True, reason=_describe(found), priority=KERNELS_PRIORITY)


def _find(context: ProbeContext) -> Installation | Availability:
    """Return the installation, or why FlashInfer is out of the question."""
    if context.device != "cuda" or context.sm is None:
        return Availability(ok=False, reason="needs an NVIDIA GPU of compute capability 7.5 or up")
    if context.sm < 75:
        return Availability(
            ok=False, reason=f"needs compute capability 7.5 or up, this GPU has {context.sm / 10}"
        )
    if context.dtype not in CAPABILITIES.dtypes:
        return Availability(
            ok=False, reason=f"serves float16 and bfloat16, the model is {context.dtype}"
        )
    if context.dtype == "bfloat16" and context.sm < 80:
        return Availability(
            ok=False,
            reason=f"bfloat16 needs compute capability 8.0 or up, this GPU has {context.sm / 10}; "
            "use --dtype float16",
        )
    found = find_installation()
    if found is None:
        return Availability(
            ok=False, reason=f"package {DISTRIBUTION} is not installed: pip install {DISTRIBUTION}"
        )
    if found.version < (0, 6):
        text = ".".join(map(str, found.version))
        return Availability(
            ok=False, reason=f"needs {DISTRIBUTION} 0.6 or newer, {text} is installed"
        )
    return found


def _missing_attention_module(context: ProbeContext, found: Installation) -> str:
    """Return what would fail at the first use, or nothing."""
    if found.can_compile:
        return ""
    # Decode on tensor cores, for odd head ratios too, runs FlashInfer's prefill module.
    kinds: tuple[AttentionKind, ...] = ("prefill_fa2", "decode")
    for kind in kinds[: 1 if context.phase == "prefill" else 2]:
        for has_window in {False, context.has_sliding_window}:
            name = attention_module(kind, context.dtype, context.head_dim, has_window)
            if not found.has_module(name):
                dim = "" if context.head_dim is None else f", head dimension {context.head_dim}"
                window = ", sliding window" if has_window else ""
                return _no_compiler(f"{kind} ({context.dtype}{dim}{window})")
    return ""


def _no_compiler(what: str) -> str:
    return (
        f"no compiled module for {what} and no nvcc to build it: put nvcc of CUDA 12 or 13 on PATH "
        "or set CUDA_HOME, or install the flashinfer-jit-cache wheel of the same version"
    )


def _describe(found: Installation) -> str:
    text = ".".join(map(str, found.version))
    return f"{DISTRIBUTION} {text}, {'nvcc found' if found.can_compile else 'prebuilt modules'}"


ATTENTION = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_attn_flashinfer.backend:FlashInferBackend",
    summary="FlashInfer paged attention, NVIDIA GPUs from Turing on",
    aliases=("flashinfer",),
    settings=FlashInferSettings,
    probe=probe_attention,
    capabilities=CAPABILITIES,
)

KERNELS = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_attn_flashinfer.kernels:FlashInferKernelSet",
    summary="FlashInfer norms, rope and activations",
    aliases=("flashinfer",),
    probe=probe_kernels,
)
