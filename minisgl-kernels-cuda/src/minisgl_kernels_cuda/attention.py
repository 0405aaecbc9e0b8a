"""The attention backend ``cuda``: one kernel of our own per layer and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.core import Batch
from minisgl_kernels_cuda.attention_plan import (
    GROUP,
    LOG2_E,
    MAX_BLOCKS_PER_SM,
    AttentionPlan,
    aligned_queries,
    choose_plan,
    fit_plan,
)
from minisgl_kernels_cuda.attention_prefill import PrefillAttention
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.plugin import MAX_PREFILL_RATIO
from minisgl_kernels_cuda.settings import CudaKernelSettings, cache_folder
from minisgl_kernels_cuda.units import ATTENTION, ATTENTION_PREFILL, DeviceSize, Launch, Loader

_LANES = 32
_TILE_DIMS = 16  # of the head dimension, in the sums that blocks leave for each other
_FLOATS_BESIDE = 16  # greatest scores and sums of weights of 8 heads
_MIN_PDL = (9, 0)

PlanChoice = Callable[[int, int], AttentionPlan]
"""Like `choose_plan`."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a launch is told about one layer: addresses of its part of the pool, scale, window."""

    k: int
    v: int
    scale: float
    window: int


class DecodeAttention(AttentionBackend):
    """Attention of one query token per request; plans nothing on the host.

    The kernel reads lengths and page table on the device, so that a captured step fits any batch.
    It reads them, and the keys and values of all tokens but the newest of each request, before
    the kernel in front of it has ended: they must have been written before the last kernel of
    the stream that was launched without programmatic dependent launch (any kernel of PyTorch),
    copy or graph. An engine's step begins with such.

    Calls share memory for the sums of split requests, so they have to be on one stream.
    """

    def __init__(
        self,
        config: AttentionConfig,
        loader: Loader,
        device: DeviceSize,
        choose: PlanChoice = choose_plan,
    ) -> None:
        """Load the kernels and allocate what blocks leave for each other, some megabytes.

        Args:
            config: Of the engine.
            loader: Where kernels come from.
            device: That they run on.
            choose: Picks the layout for a number of (request, KV head) pairs.

        Raises:
            PluginError: The kernels cannot be compiled or loaded.
        """
        self._config = config
        self._device = device
        self._choose = choose
        self._launches = loader.load(ATTENTION, config.dtype)
        self._ratio = config.num_qo_heads // config.num_kv_heads
        self._page_size = config.context.page_size
        is_power = self._page_size & (self._page_size - 1) == 0
        self._page_shift = self._page_size.bit_length() - 1 if is_power else -1
        pool = config.context.kv_pool
        self._layers = [
            _Layer(
                pool.k_cache(i).data_ptr(), pool.v_cache(i).data_ptr(),
                layer.sm_scale * LOG2_E, layer.window_left,
            )
            for i, layer in enumerate(config.layers)
        ]  # fmt: skip
        max_blocks = MAX_BLOCKS_PER_SM * device.num_sms
        floats = 4 * _LANES * (config.head_dim // _TILE_DIMS) + _FLOATS_BESIDE
        self._partials = torch.empty(2 * max_blocks * floats, device=config.device)
        self._arrived = torch.zeros(max_blocks, dtype=torch.int32, device=config.device)
        self._plans: dict[int, tuple[Launch, AttentionPlan, int, int]] = {}

    def prepare_metadata(self, batch: Batch) -> None:
        """Nothing to plan."""
        assert batch.is_decode, "cuda serves decode batches"

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        """Attend; see `AttentionBackend.forward`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward_into(out, q, layer_id, batch)
        return out

    def forward_into(self, out: Tensor, q: Tensor, layer_id: int, batch: Batch) -> None:
        """Attend into ``out``; see `AttentionBackend.forward_into`."""
        config, layer = self._config, self._layers[layer_id]
        assert batch.table_idx is not None, "the engine sets table_idx"
        assert batch.seq_lens is not None, "the engine sets seq_lens"
        num_reqs = q.shape[0]
        q = aligned_queries(q)
        launch, plan, num_blocks, shared_bytes = self._plan(num_reqs)
        page_table = config.context.page_table
        launch(
            (num_blocks, 1), (plan.warps * _LANES, 1),
            out.data_ptr(), q.data_ptr(), layer.k, layer.v, page_table.data_ptr(),
            batch.table_idx.data_ptr(), batch.seq_lens.data_ptr(),
            self._partials.data_ptr(), self._arrived.data_ptr(), q.stride(0),
            page_table.shape[1], self._page_size, self._page_shift, num_reqs,
            config.num_kv_heads, self._ratio, layer.window, plan.has_ends,
            layer.scale,
            shared_bytes=shared_bytes,
        )  # fmt: skip

    def init_graph(self, max_batch_size: int) -> None:
        """Nothing to get ready."""

    def prepare_for_capture(self, batch: Batch) -> None:
        """Nothing to plan: the graph keeps the addresses of the batch's tensors."""

    def prepare_for_replay(self, batch: Batch) -> None:
        """Nothing to bring up to date: the kernel reads the batch's tensors."""

    def _plan(self, num_reqs: int) -> tuple[Launch, AttentionPlan, int, int]:
        """Return kernel, layout, number of blocks and shared memory for a number of rows."""
        found = self._plans.get(num_reqs)
        if found is None:
            config, num_sms = self._config, self._device.num_sms
            key_bytes = config.head_dim * config.dtype.itemsize
            plan = self._choose(num_reqs * config.num_kv_heads, num_sms)
            plan = fit_plan(plan, num_reqs, key_bytes, self._device)
            launch = self._launches[f"attention_{config.head_dim}_{plan.warps}"]
            num_heads = config.num_kv_heads * -(-self._ratio // GROUP)
            max_chunks = num_reqs * num_heads * -(-config.max_seq_len // plan.chunk_keys)
            num_blocks = min(num_sms * plan.blocks_per_sm, max_chunks)
            found = launch, plan, num_blocks, plan.shared_bytes(num_reqs, key_bytes)
            self._plans[num_reqs] = found
        return found


class CudaAttention(AttentionBackend):
    """Both phases, each by a kernel of its own.

    Attributes:
        decode: Serves decode batches, captured ones too.
        prefill: Serves prefill batches.
    """

    def __init__(self, decode: DecodeAttention, prefill: PrefillAttention) -> None:
        """Combine them."""
        self.decode = decode
        self.prefill = prefill

    def prepare_metadata(self, batch: Batch) -> None:
        """Nothing to plan."""

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        """Attend; see `AttentionBackend.forward`."""
        return (self.decode if batch.is_decode else self.prefill).forward(q, layer_id, batch)

    def forward_into(self, out: Tensor, q: Tensor, layer_id: int, batch: Batch) -> None:
        """Attend into ``out``; see `AttentionBackend.forward_into`."""
        backend = self.decode if batch.is_decode else self.prefill
        backend.forward_into(out, q, layer_id, batch)

    def init_graph(self, max_batch_size: int) -> None:
        """Nothing to get ready."""

    def prepare_for_capture(self, batch: Batch) -> None:
        """Nothing to plan; see `DecodeAttention.prepare_for_capture`."""

    def prepare_for_replay(self, batch: Batch) -> None:
        """Nothing to bring up to date."""


def build_attention(config: AttentionConfig) -> AttentionBackend:
    """Compile what is not in the cache, load it and make the backend.

    Returns:
        For both phases where device, dtype and heads allow, else for decode alone.

    Raises:
        PluginError: NVRTC is missing or refuses.
    """
    settings = config.settings
    if not isinstance(settings, CudaKernelSettings):
        settings = CudaKernelSettings()
    size = device_size(config.device)
    compiler = Compiler(size.arch, cache_folder(settings.cache_dir))
    has_pdl = torch.cuda.get_device_capability(config.device) >= _MIN_PDL
    loader = DeviceLoader(config.device, compiler, has_pdl and settings.pdl != "off")
    backend = combine(config, loader, size)
    # What it has set to zero will be used on the engine's stream.
    torch.cuda.current_stream(config.device).synchronize()
    return backend


def combine(config: AttentionConfig, loader: Loader, device: DeviceSize) -> AttentionBackend:
    """Make the backend of what serves this device and model; see `build_attention`."""
    decode = DecodeAttention(config, loader, device)
    has_kernel = device.arch == ATTENTION_PREFILL.only_arch and config.dtype != torch.float32
    # A choice of decode alone, as the probe leaves it to many heads, must not fail for prefill.
    if not has_kernel or config.num_qo_heads > MAX_PREFILL_RATIO * config.num_kv_heads:
        return decode
    return CudaAttention(decode, PrefillAttention(config, loader, device))
