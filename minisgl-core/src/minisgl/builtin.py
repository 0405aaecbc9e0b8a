"""The core's own backends, registered by the same road as everyone else's."""

from __future__ import annotations

from importlib.util import find_spec

from minisgl.native.library import unavailable_reason
from minisgl.plugin.spec import (
    PLUGIN_API,
    Availability,
    BackendSpec,
    Capabilities,
    Probe,
    ProbeContext,
)


def _with_priority(priority: int) -> Probe:
    """Make the probe of a backend that always works, for kinds that have several of those."""

    def probe(context: ProbeContext) -> Availability:
        del context
        return Availability(ok=True, priority=priority)

    return probe


def _has_native_code(context: ProbeContext) -> Availability:
    """Report whether C++ for this CPU can be compiled, and is of use."""
    if context.device != "cpu":
        return Availability(ok=False, reason="runs on a CPU only")
    if context.dtype != "float32":
        return Availability(ok=False, reason=f"serves float32, the model is {context.dtype}")
    reason = unavailable_reason()
    if reason is not None:
        return Availability(ok=False, reason=reason)
    # Above the references, and below whatever a user has installed for the purpose.
    return Availability(ok=True, reason="a C++ compiler is there", priority=5)


def _has_modelscope(context: ProbeContext) -> Availability:
    """Report whether the optional library is installed."""
    del context
    if find_spec("modelscope") is None:
        return Availability(ok=False, reason="pip install 'minisgl-core[modelscope]'")
    return Availability(ok=True)


# attention
NATIVE_ATTENTION = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.attention.native_backend:NativeAttentionBackend",
    summary="our own C++ for a CPU, compiled at first use; float32",
    probe=_has_native_code,
    capabilities=Capabilities(dtypes=("float32",)),
)
TORCH_ATTENTION = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.attention.torch_backend:TorchAttentionBackend",
    summary="PyTorch reference, any device",
)

# prefix caches
RADIX_CACHE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.kvcache.radix:RadixCache",
    summary="radix tree with LRU eviction",
    probe=_with_priority(10),
)
NAIVE_CACHE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.kvcache.naive:NaiveCache",
    summary="no prefix is ever shared",
)

# mixture of experts
TORCH_MOE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.moe.torch_backend:TorchMoEBackend",
    summary="PyTorch reference, tokens grouped by expert",
)

# kernel sets
NATIVE_KERNELS = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.ops.native_set:NativeKernelSet",
    summary="our own C++ for a CPU, compiled at first use; float32",
    probe=_has_native_code,
)
TORCH_KERNELS = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.ops.torch_set:TorchKernelSet",
    summary="PyTorch reference of every op",
)

# collectives
TORCH_COMM = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.distributed.torch_comm:build_communicator",
    summary="torch.distributed: gloo on a CPU, NCCL on GPUs",
)

# schedule policies
FCFS_POLICY = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.scheduler.policy:FcfsPolicy",
    summary="first come, first served",
    probe=_with_priority(10),
)
LPM_POLICY = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.scheduler.policy:LpmPolicy",
    summary="longest cached prefix first",
)
PRIORITY_POLICY = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.scheduler.policy:PriorityPolicy",
    summary="highest priority first",
)

# model sources
LOCAL_SOURCE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.weights.local:LocalSource",
    summary="folder with config.json and safetensors",
    probe=_with_priority(20),
)
GGUF_SOURCE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.weights.gguf:GGUFSource",
    summary="one .gguf file",
    probe=_with_priority(30),
)
HUB_SOURCE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.weights.hub:HubSource",
    summary="Hugging Face hub id",
    aliases=("huggingface", "hf"),
    probe=_with_priority(10),
)
MODELSCOPE_SOURCE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.weights.modelscope:ModelScopeSource",
    summary="ModelScope id (extra: modelscope)",
    probe=_has_modelscope,
)
DEMO_SOURCE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.weights.demo:DemoSource",
    summary="SmolLM2-135M-Instruct, the model of the examples",
    probe=_with_priority(40),
)

# model architectures
LLAMA = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.models.llama:LlamaForCausalLM",
    summary="Llama 2 and 3.x, and what shares its code",
)
MISTRAL = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.models.mistral:MistralForCausalLM",
    summary="Mistral",
)
QWEN2 = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.models.qwen2:Qwen2ForCausalLM",
    summary="Qwen2 and Qwen2.5",
)
QWEN3 = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.models.qwen3:Qwen3ForCausalLM",
    summary="Qwen3",
)
QWEN3_MOE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.models.qwen3_moe:Qwen3MoeForCausalLM",
    summary="Qwen3-MoE",
)
MIXTRAL = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl.models.mixtral:MixtralForCausalLM",
    summary="Mixtral",
)
