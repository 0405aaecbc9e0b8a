"""The core's own sections; their fields are flat flags (``--page-size``)."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from minisgl.config.fields import Bytes, Setting, SettingsSection

BackendChoice = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^\S+$"),
    Setting(metavar="NAME", allowed="names of installed backends (see `minisgl plugins`)"),
]
"""``auto``, a name, or several by commas, as the kind takes them."""


def _path_text(value: object) -> object:
    """Accept a ``Path`` too; what is no text else stays as it is, to be refused."""
    return str(value) if isinstance(value, PurePath) else value


def _dtype_name(value: object) -> object:
    """Accept a ``torch.dtype`` without importing torch: its text is ``torch.<name>``."""
    return str(value).removeprefix("torch.")


class ModelSettings(SettingsSection):
    """Which model runs, and in which form."""

    model: Annotated[
        str,
        BeforeValidator(_path_text),
        Setting(
            flags=("--model-path",),
            keywords=("model_path",),
            allowed="a folder, .gguf file, hub id or demo",
            metavar="MODEL",
        ),
    ] = Field(
        min_length=1,
        max_length=4096,
        description="Folder, .gguf file, hub id, or demo. Read by the model sources.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Branch, tag or commit of a hub model. Read by the model sources.",
    )
    model_source: BackendChoice = Field(
        "auto", description="Where models come from, by name. Read by the loader."
    )
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], BeforeValidator(_dtype_name)
    ] = Field(
        "auto",
        description="Type of weights and KV; auto is the checkpoint's, or one that the device "
        "computes well. Read by the engine.",
    )
    dummy_weight: Annotated[bool, Setting(keywords=("use_dummy_weight",))] = Field(
        False, description="Random weights in place of the checkpoint's. Read by the loader."
    )
    max_seq_len_override: int | None = Field(
        None,
        ge=2,
        le=2**24,
        description="Most tokens of a request, prompt and output together; auto is the model's "
        "limit. Read by the engine.",
    )


class BackendSettings(SettingsSection):
    """Which backend of each kind is used."""

    attn: Annotated[
        BackendChoice,
        Setting(flags=("--attention-backend",), keywords=("attention_backend", "attention")),
    ] = Field(
        "auto",
        description="Attention: one name, or PREFILL,DECODE, or with a third for decode batches of "
        "more than 8 requests. Read by the engine.",
    )
    cache: Annotated[BackendChoice, Setting(flags=("--cache-type",), keywords=("cache_type",))] = (
        Field("radix", description="Prefix cache. Read by the scheduler.")
    )
    moe: Annotated[BackendChoice, Setting(flags=("--moe-backend",), keywords=("moe_backend",))] = (
        Field("auto", description="Mixture of experts. Read by the engine.")
    )
    kernels: BackendChoice = Field(
        "auto",
        description="Kernel sets, the first that has an op wins, such as cuda,fi,torch. "
        "Read by the engine.",
    )
    comm: BackendChoice = Field(
        "auto", description="Collectives of tensor parallelism. Read by the engine."
    )
    policy: BackendChoice = Field(
        "fcfs", description="Order in which waiting requests start. Read by the scheduler."
    )


class EngineSettings(SettingsSection):
    """Device, memory and parallelism."""

    device: Annotated[str, Setting(allowed="auto, cpu, cuda or cuda:N", metavar="DEVICE")] = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$",
        description="Where the model runs; auto is CUDA where there is one. Read by the engine.",
    )
    page_size: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Tokens of a KV page; auto is the smallest from 16 on that the attention "
        "backends share. Read by the engine.",
    )
    num_pages: Annotated[int | None, Setting(keywords=("num_page_override",))] = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="KV pages; auto is as many as fit in memory. Read by the engine.",
    )
    memory_ratio: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of GPU memory for weights, the buffers of a MoE backend and KV pages "
        "together. Read by the engine.",
    )
    cpu_kv_cache_bytes: Annotated[Bytes, Setting(allowed="a size from 1MiB to 1PiB")] = Field(
        2**30,
        ge=2**20,
        le=2**50,
        description="Bytes of KV pages on a CPU, with or without a unit. Read by the engine.",
    )
    max_running_requests: Annotated[
        int, Setting(keywords=("max_running_req", "max_running_reqs"))
    ] = Field(256, ge=1, le=65536, description="Requests that run at once. Read by the engine.")
    cuda_graph_max_bs: Annotated[int | None, Setting(flags=("--graph",))] = Field(
        None,
        ge=0,
        le=65536,
        description="Largest decode batch, in requests, that runs from a captured graph; 0 "
        "captures none, auto is 256 on a GPU and 0 on a CPU. Read by the engine.",
    )
    prefill_graph_max_tokens: int | None = Field(
        None,
        ge=0,
        le=2**24,
        description="Most prompt tokens of a step that runs from captured graphs, all but its "
        "attention; 0 captures none, auto is 0 on a CPU and on a GPU as many as it computes while "
        "the host would launch the step. Read by the engine.",
    )
    tp: Annotated[
        int,
        Setting(
            flags=("--tp-size", "--tensor-parallel-size"),
            keywords=("tp_size", "tensor_parallel_size"),
        ),
    ] = Field(
        1, ge=1, le=1024, description="Tensor-parallel ranks, of all nodes. Read by the launcher."
    )
    nnodes: int = Field(
        1,
        ge=1,
        le=1024,
        description="Machines that the ranks are spread over, each with its own `minisgl serve`. "
        "Read by the launcher.",
    )
    node_rank: int = Field(
        0,
        ge=0,
        le=1023,
        description="Number of this machine; 0 answers requests, the others follow it. "
        "Read by the launcher.",
    )
    master: Annotated[
        str | None, Setting(allowed="HOST:PORT, or [IPV6]:PORT", metavar="HOST:PORT")
    ] = Field(
        None,
        max_length=255,
        pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:\[\]/]+):[0-9]{1,5}$",
        description="Where the ranks of several machines meet: an address of node 0 that all of "
        "them reach, and a free port there. Anyone who reaches it can disturb them, so it belongs "
        "into a trusted network. Read by the collectives.",
    )
    distributed_timeout_s: Annotated[float, Setting(keywords=("distributed_timeout",))] = Field(
        300.0,
        gt=0,
        le=86400,
        description="Seconds that ranks wait for one another: at start, and in a step. Read by the "
        "collectives.",
    )


class SchedulerSettings(SettingsSection):
    """What runs when."""

    max_prefill_length: Annotated[
        int,
        Setting(
            flags=("--max-extend-length",), keywords=("max_extend_tokens", "max_extend_length")
        ),
    ] = Field(
        8192,
        ge=1,
        le=2**24,
        description="Prompt tokens of one step; longer prompts run in chunks. "
        "Read by the scheduler.",
    )
    max_prefill_steps: int = Field(
        4,
        ge=1,
        le=65536,
        description="Prefill steps in a row while decodes wait. Read by the scheduler.",
    )
    admission: Literal["optimistic", "reserve"] = Field(
        "optimistic",
        description="Whether a request starts when its prompt fits, or only when its whole "
        "max_tokens fits as well. Read by the scheduler.",
    )
    overlap: bool = Field(
        True,
        description="Prepare a step while the device runs the one before. Read by the scheduler.",
    )
    max_queued_requests: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Requests that may wait before new ones are refused; auto is no limit. "
        "Read by the server and the scheduler.",
    )


class RecordSettings(SettingsSection):
    """A trace of what the scheduler does, for `minisgl replay`."""

    record: Annotated[
        str | None,
        BeforeValidator(lambda value: None if value is None else str(value)),  # a Path will do
        Setting(metavar="FILE"),
    ] = Field(
        None,
        min_length=1,
        max_length=4096,
        description="New file that takes a trace of requests and decisions. Read by the scheduler.",
    )
    record_prompts: bool = Field(
        False,
        description="Put token ids of prompts and outputs into the trace too; without them it "
        "tells only lengths and what prompts have in common. Read by the scheduler.",
    )


CORE_SECTIONS: tuple[type[SettingsSection], ...] = (
    ModelSettings,
    BackendSettings,
    EngineSettings,
    SchedulerSettings,
    RecordSettings,
)
"""The sections that every engine has."""
