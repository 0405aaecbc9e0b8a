"""What a distribution registers to offer a backend: plain data that is light to import.

An entry point in the group of its kind (``minisgl.attention``, ``minisgl.kernels``, …) names a
`BackendSpec`. Reading one tells what the backend is called, whether it would work here and which
settings it has; the heavy code behind ``factory`` is imported only when the backend is picked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import BaseModel

PLUGIN_API = 1
"""The number of the plugin contract; a spec written for another number is refused."""

Phase = Literal["prefill", "decode"]

SMALL_DECODE_REQS = 8
"""Requests up to which a decode batch is a small one, for which another attention may be best."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an attention backend can do, as data so that resolution can reason about it.

    Attributes:
        phases: Batch phases that the backend serves.
        page_sizes: Allowed KV page sizes in tokens; ``None`` allows any, ``page_multiple`` apart.
        page_multiple: The page size has to be a multiple of this many tokens.
        dtypes: Names of the torch dtypes of q and KV, such as ``"bfloat16"``.
        head_dims: Allowed head dimensions; ``None`` allows any.
        has_graph_capture: Whether the decode phase can be captured in a CUDA graph.
        has_sliding_window: Whether ``window_left >= 0`` is served.
    """

    phases: tuple[Phase, ...] = ("prefill", "decode")
    page_sizes: tuple[int, ...] | None = None
    page_multiple: int = 1
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    head_dims: tuple[int, ...] | None = None
    has_graph_capture: bool = True
    has_sliding_window: bool = True


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """The machine and model that a probe is asked about.

    A model source is asked before there is a model, and in processes that have no device, so at a
    start it gets the defaults.

    Attributes:
        device: Device type, ``"cpu"`` or ``"cuda"``.
        sm: CUDA compute capability as ``major * 10 + minor``, or ``None`` without CUDA.
        dtype: Name of the torch dtype of weights and KV.
        head_dim: Head dimension, or ``None`` when no model was named.
        num_qo_heads: Query heads of one rank, or ``None``.
        num_kv_heads: KV heads of one rank, or ``None``.
        page_size: KV page size in tokens that the user asked for, or ``None``.
        tp_size: Number of tensor-parallel ranks.
        has_sliding_window: Whether any layer of the model has a sliding window.
        needs_graph_capture: Whether the user asked for captured decode steps by a batch size.
        phase: For attention, the phase that ``auto`` chooses for; ``None`` when asked in general.
        decode_reqs: `SMALL_DECODE_REQS` when ``auto`` chooses an attention for decode batches of up
            to so many requests, ``None`` for larger ones and for all else. It is for plugins that
            are best at few requests only, or at many; no probe of this repository reads it.
    """

    device: str = "cpu"
    sm: int | None = None
    dtype: str = "float32"
    head_dim: int | None = None
    num_qo_heads: int | None = None
    num_kv_heads: int | None = None
    page_size: int | None = None
    tp_size: int = 1
    has_sliding_window: bool = False
    needs_graph_capture: bool = False
    phase: Phase | None = None
    decode_reqs: int | None = None


@dataclass(frozen=True, slots=True)
class Availability:
    """The answer of a probe.

    Attributes:
        ok: Whether the backend would work.
        reason: Why not, and what would help; or, when ``ok``, why this priority.
        priority: ``auto`` picks the available backend with the highest one. The torch references
            have 0. It may differ by ``ProbeContext.phase`` and ``decode_reqs``.
        capabilities: For attention, what it can do on this machine, where that depends on what is
            installed; ``None`` leaves those of the spec.
    """

    ok: bool
    reason: str = ""
    priority: int = 0
    capabilities: Capabilities | None = None


Probe = Callable[[ProbeContext], Availability]


def always_available(context: ProbeContext) -> Availability:
    """Report a backend that works on every machine, with the lowest priority."""
    del context
    return Availability(ok=True)


ConfigAdapter = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # Any: free-form JSON
"""Turns the config.json of an architecture into the fields that `normalize_config` reads."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One backend, as its distribution describes it.

    Attributes:
        api: The `PLUGIN_API` that the backend was written for.
        factory: ``"package.module:attribute"`` of a callable that takes the ``…Config`` dataclass
            of its kind and returns the backend; imported only when the backend is picked.
        summary: One line for ``minisgl plugins``.
        aliases: Other names under which a user may ask for it.
        settings: A frozen pydantic model whose fields become flags (``--NAME.field``),
            environment variables and file keys; an instance is ``config.settings``.
        probe: Says whether the backend would work here. It must not import heavy libraries and
            must not initialise CUDA.
        capabilities: For attention, what it can do.
        adapt_config: For a model whose config.json has spellings or defaults of its own: returns
            the JSON with the fields that `minisgl.models.config.normalize_config` reads. It is
            what ``ModelConfig.raw`` then holds, so fields that only the model reads stay in it.
    """

    api: int
    factory: str
    summary: str = ""
    aliases: tuple[str, ...] = ()
    settings: type[BaseModel] | None = None
    probe: Probe = always_available
    capabilities: Capabilities = field(default_factory=Capabilities)
    adapt_config: ConfigAdapter | None = None
