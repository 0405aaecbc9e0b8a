"""Assembles an engine: backends, model, weights, KV pool, context, in this order."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.attention.split import SplitAttentionBackend
from minisgl.config.load import Settings
from minisgl.config.placement import Placement
from minisgl.core import Context
from minisgl.device import pick_device, set_cpu_threads
from minisgl.distributed.contract import CommConfig, Communicator
from minisgl.engine.agreement import check_nodes_agree
from minisgl.engine.backends import EngineBackends, probe_context
from minisgl.engine.contract import EngineLimits
from minisgl.engine.engine import Engine, EngineParts
from minisgl.engine.graph import graph_sizes
from minisgl.engine.memory import MemoryBudget, count_pages
from minisgl.engine.prefill_graph import launch_bound_tokens, prefill_graph_sizes
from minisgl.errors import SettingsError
from minisgl.kvcache.pool import KVPool, PoolShape
from minisgl.models.config import ModelConfig
from minisgl.models.contract import Model, ModelBuild
from minisgl.models.read import read_model_config
from minisgl.moe.contract import MoEBackend, MoEConfig
from minisgl.ops.contract import KernelConfig, KernelSet, KernelTable
from minisgl.ops.table import build_kernel_table
from minisgl.plugin.hooks import logits_processors, notify_engine_ready
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.records import EngineInfo, LogitsProcessor
from minisgl.plugin.selection import SelectedBackend
from minisgl.plugin.spec import ProbeContext
from minisgl.weights.contract import ModelFiles
from minisgl.weights.dtype import resolve_dtype
from minisgl.weights.loader import init_dummy_weights, load_weights

logger = logging.getLogger(__name__)

_MIN_SEQ_LEN = 2  # a token of the prompt and one that is generated
_MAX_GRAPH_BATCH = 256  # beyond it a decode step is bound by the device even without a graph


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine is built for.

    Attributes:
        settings: All settings.
        manager: The plugins of this process.
        files: The opened model.
        eos_token_ids: Every id that ends a sequence, from all sources.
        logits_processors: To run after those of hooks.
        rank: Tensor-parallel rank of this process.
        init_method: Rendezvous of the ranks; unused with one rank.
        on_lost: See `CommConfig.on_lost`.
        on_tensor: See `load_weights`.
        show_progress: Whether to show bars on stderr.
    """

    settings: Settings
    manager: PluginManager
    files: ModelFiles
    eos_token_ids: frozenset[int] = frozenset()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    rank: int = 0
    init_method: str = ""
    on_lost: Callable[[], None] | None = None
    on_tensor: Callable[[], None] | None = None
    show_progress: bool = False


def describe_to_probes(request: EngineRequest) -> ProbeContext:
    """Return the machine and model that an engine would be built for.

    For probes of backends that are not the engine's own, such as the scheduler's.

    Raises:
        SettingsError: The device does not exist, or the dtype is not one to compute in.
        ModelError: The model is of no kind that we run.
    """
    return probe_context(request.settings, *_target_of(request))


def build_engine(request: EngineRequest) -> Engine:
    """Assemble, load and warm up an engine.

    Raises:
        SettingsError: A setting cannot be met on this machine or by this model.
        PluginError: A backend cannot be had.
        ModelError: The model cannot be run, or its files are damaged.
    """
    return _Builder(request).build()


class _Builder:
    """The steps of `build_engine`; lives as long as they take."""

    def __init__(self, request: EngineRequest) -> None:
        """Decide everything that can be decided before memory is taken."""
        settings = request.settings
        self._request = request
        self._settings = settings
        self._config, self._device, self._dtype = _target_of(request)
        if self._device.type == "cpu":
            num_ranks = len(Placement.of(settings.engine).ranks)
            logger.debug("%d CPU threads", set_cpu_threads(num_ranks))
        self._backends = EngineBackends.resolve(
            request.manager, settings, self._config, self._device, self._dtype
        )
        for line in self._backends.describe():
            logger.info("%s", line)
        self._max_seq_len = settings.model.max_seq_len_override or self._config.context_len
        self._budget = MemoryBudget.measure(self._device)

    def build(self) -> Engine:
        """Take memory, load and assemble."""
        comm = self._build_comm()
        try:
            return self._build_around(comm)
        except BaseException:
            comm.shutdown()  # or the other ranks would wait for this one
            raise

    def _build_around(self, comm: Communicator) -> Engine:
        started = time.perf_counter()
        hooks = self._request.manager.hooks
        if self._settings.engine.nnodes > 1:
            check_nodes_agree(comm, self._settings, self._dtype)
        kernels = self._build_kernels()
        model = self._load_model(kernels, comm)
        ctx, limits = self._build_context(model, kernels, comm)
        info = self._info(limits, 0.0)
        parts = EngineParts(
            device=self._device,
            model=model,
            context=ctx,
            limits=limits,
            base_seed=_shared_seed(comm),
            graph_sizes=self._graph_sizes(),
            prefill_graph_sizes=self._prefill_graph_sizes(),
            logits_processors=(
                *logits_processors(hooks, info),
                *self._request.logits_processors,
            ),
            backends=self._backends.names(),
            picked=self._backends.selected(),
        )
        engine = Engine(parts, self._request.show_progress)
        notify_engine_ready(hooks, replace(info, start_s=time.perf_counter() - started))
        return engine

    def _info(self, limits: EngineLimits, start_s: float) -> EngineInfo:
        """Describe the engine to hooks."""
        return EngineInfo(
            model=self._request.files.name,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            vocab_size=limits.vocab_size,
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            max_running_reqs=limits.max_running_reqs,
            max_seq_len=limits.max_seq_len,
            tp_size=self._settings.engine.tp,
            backends=self._backends.names(),
            start_s=start_s,
        )

    def _build_comm(self) -> Communicator:
        backend = self._backends.comm.one
        config = CommConfig(
            rank=self._request.rank,
            size=self._settings.engine.tp,
            device=self._device,
            dtype=self._dtype,
            init_method=self._request.init_method,
            timeout_s=self._settings.engine.distributed_timeout_s,
            settings=self._settings.plugin(backend.key),
            on_lost=self._request.on_lost,
        )
        comm: Communicator = backend.build(config, Communicator)
        return comm

    def _build_kernels(self) -> KernelTable:
        config = KernelConfig(self._device, self._dtype)
        sets = [
            (b.name, b.build(replace(config, settings=self._settings.plugin(b.key)), KernelSet))
            for b in self._backends.kernels.chosen
        ]
        return build_kernel_table(sets)

    def _load_model(self, kernels: KernelTable, comm: Communicator) -> Model:
        """Allocate the model, stream its weights in, pack them."""
        started, on_tensor = time.perf_counter(), self._request.on_tensor
        build = ModelBuild(
            self._config, self._dtype, self._device, kernels, comm, self._max_seq_len
        )
        with torch.inference_mode():
            model: Model = self._backends.model.one.build(build, Model)
            targets = list(model.load_targets())
            if self._settings.model.dummy_weight:
                init_dummy_weights(targets, on_tensor=on_tensor)
            else:
                reader = self._request.files.open_weights()
                try:
                    load_weights(targets, reader, self._request.show_progress, on_tensor)
                finally:
                    reader.close()
            del targets  # they hold on to weights that packing lets go of
            model.finalize()
        logger.info("loaded the weights in %.1f s", time.perf_counter() - started)
        return model

    def _build_context(
        self, model: Model, kernels: KernelTable, comm: Communicator
    ) -> tuple[Context, EngineLimits]:
        """Size the pool, and fill a context with everything that a forward pass reads."""
        engine, page_size = self._settings.engine, self._backends.attention.page_size
        ctx = Context(page_size)
        if self._backends.moe is not None:
            # Before the pool is sized, so that it leaves room for what a backend allocates.
            ctx.moe_backend = self._build_moe(self._backends.moe.one)
        shape = PoolShape(
            len(model.layers_attention), 0, page_size, model.num_kv_heads, model.head_dim
        )
        num_pages = count_pages(self._budget, engine, shape, self._dtype, self._max_seq_len)
        shape = replace(shape, num_pages=comm.min_int(num_pages))
        max_seq_len = min(self._max_seq_len, shape.num_pages * page_size)
        if max_seq_len < _MIN_SEQ_LEN:
            raise SettingsError(
                f"--num-pages {shape.num_pages}: with --page-size {page_size} there is room for "
                f"{max_seq_len} token; a request needs at least {_MIN_SEQ_LEN}"
            )
        ctx.kernels, ctx.comm = kernels, comm
        ctx.kv_pool = KVPool(shape, self._dtype, self._device)
        logger.info(
            "KV cache: %d pages of %d tokens, %.2f GiB",
            shape.num_pages,
            page_size,
            ctx.kv_pool.num_bytes / 2**30,
        )
        num_rows = engine.max_running_requests + 1  # the last one is for padding
        max_pages = -(-max_seq_len // page_size)
        ints = torch.zeros(0, dtype=torch.int32, device=self._device)
        ctx.page_table = ints.new_full((num_rows, max_pages), ctx.kv_pool.dummy_page)
        ctx.token_pool = ints.new_zeros((num_rows, max_seq_len))
        ctx.attn_backend = self._build_attention(model, ctx, max_seq_len)
        limits = EngineLimits(
            num_pages=shape.num_pages,
            page_size=page_size,
            max_running_reqs=engine.max_running_requests,
            max_seq_len=max_seq_len,
            vocab_size=model.vocab_size,
            eos_token_ids=self._request.eos_token_ids,
        )
        return ctx, limits

    def _build_attention(self, model: Model, ctx: Context, max_seq_len: int) -> AttentionBackend:
        config = AttentionConfig(
            context=ctx,
            num_qo_heads=model.num_qo_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self._dtype,
            device=self._device,
            layers=model.layers_attention,
            max_running_reqs=self._settings.engine.max_running_requests,
            max_seq_len=max_seq_len,
        )
        chosen = self._backends.attention
        parts = (chosen.prefill, chosen.decode, chosen.large_decode)
        distinct = {backend.key: backend for backend in parts}
        built = {key: self._build_one(backend, config) for key, backend in distinct.items()}
        if len(built) == 1:
            return built[chosen.prefill.key]
        return SplitAttentionBackend(*(built[backend.key] for backend in parts))

    def _build_one(self, backend: SelectedBackend, config: AttentionConfig) -> AttentionBackend:
        settings = self._settings.plugin(backend.key)
        config = replace(config, settings=settings)
        built: AttentionBackend = backend.build(config, AttentionBackend)
        return built

    def _build_moe(self, backend: SelectedBackend) -> MoEBackend:
        moe = self._config.moe
        assert moe is not None, "only sparse models have a MoE backend"
        config = MoEConfig(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            hidden_size=self._config.hidden_size,
            intermediate_size=moe.intermediate_size // self._settings.engine.tp,
            is_renormalized=moe.is_renormalized,
            dtype=self._dtype,
            device=self._device,
            max_num_tokens=self._settings.scheduler.max_prefill_length,
            settings=self._settings.plugin(backend.key),
        )
        built: MoEBackend = backend.build(config, MoEBackend)
        return built

    def _graph_sizes(self) -> tuple[int, ...]:
        """Return the decode batch sizes to capture; a CPU captures only when asked to."""
        engine, max_batch = self._settings.engine, self._settings.engine.cuda_graph_max_bs
        if not self._backends.attention.has_graph_capture:
            return ()
        if max_batch is None:
            max_batch = _MAX_GRAPH_BATCH if self._device.type == "cuda" else 0
        return graph_sizes(min(max_batch, engine.max_running_requests))

    def _prefill_graph_sizes(self) -> tuple[int, ...]:
        """Return the numbers of prompt tokens to capture; a CPU captures only when asked to."""
        engine = self._settings.engine
        max_tokens = engine.prefill_graph_max_tokens
        if max_tokens is None:
            is_cuda = self._device.type == "cuda" and engine.cuda_graph_max_bs != 0
            max_tokens = launch_bound_tokens(self._config, engine.tp) if is_cuda else 0
        return prefill_graph_sizes(min(max_tokens, self._settings.scheduler.max_prefill_length))


def _target_of(request: EngineRequest) -> tuple[ModelConfig, torch.device, torch.dtype]:
    """Return what is to run, where and in which dtype."""
    settings, files = request.settings, request.files
    config = read_model_config(files.config, request.manager)
    local_rank = Placement.of(settings.engine).local_rank(request.rank)
    device = pick_device(settings.engine.device, local_rank)
    return config, device, resolve_dtype(files.config, settings.model.dtype, device.type)


def _shared_seed(comm: Communicator) -> int:
    """Return a random number that all ranks agree on and no other engine is likely to have."""
    seed = secrets.randbits(63).to_bytes(8, "little") if comm.rank == 0 else None
    return int.from_bytes(comm.broadcast_bytes(seed), "little")
