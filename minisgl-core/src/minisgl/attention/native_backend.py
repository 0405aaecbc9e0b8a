"""The attention backend ``native``: C++ over the pages of a float32 pool, on a CPU.

``sources/attention.cpp`` has the arithmetic, ``sources/attention_plan.h`` decides once per step who
reads which keys: a prefix that several decoding requests share is read once for all of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.core import Batch
from minisgl.native.library import load_unit

_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p
# Room for plans of usual steps; the planner says when it needs more.
_PLAN_SIZE = 1024


class _Requests(ctypes.Structure):
    """``Requests`` of attention_plan.h; kept between steps, the varying fields are set anew."""

    _fields_ = (
        ("page_table", _POINTER),
        ("table_idx", _POINTER),
        ("seq_lens", _POINTER),
        ("cu_seqlens_q", _POINTER),
        ("table_stride", _INT),
        ("num_reqs", _INT),
        ("page_size", _INT),
        ("window_left", _INT),
        ("num_qo_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("num_threads", _INT),
    )


class _LayerFields(ctypes.Structure):
    """``Layer`` of attention.cpp."""

    _fields_ = (
        ("k", _POINTER),
        ("v", _POINTER),
        ("page_table", _POINTER),
        ("table_stride", _INT),
        ("page_size", _INT),
        ("num_qo_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("sm_scale", ctypes.c_float),
    )


class _Layer(NamedTuple):
    """What one layer's `forward` needs; ``is_first`` of the layers with its window."""

    fields: _LayerFields
    address: int
    window_left: int
    is_first: bool


@dataclass(slots=True)
class NativeMetadata:
    """Plans of one step, by ``window_left``; filled by the backend.

    Attributes:
        plans: ``[size]`` int32 each.
        is_planned_by_layers: Whether the first layer of each window plans, from the batch's
            tensors, so that a captured step holds the planning too.
    """

    plans: dict[int, torch.Tensor] = field(default_factory=dict)
    is_planned_by_layers: bool = False


class NativeAttentionBackend(AttentionBackend):
    """Online softmax over tiles of queries and keys; threads share requests, heads and keys."""

    def __init__(self, config: AttentionConfig) -> None:
        """Compile the code if it never was, and note where each layer's pool is.

        Raises:
            CompileError: There is no usable compiler.
        """
        unit = load_unit("attention")
        self._make_plan = unit.attention_plan
        self._make_plan.argtypes = (_POINTER, _POINTER, ctypes.c_int64, _POINTER)
        self._make_plan.restype = ctypes.c_int64
        self._run = unit.attention_run
        self._run.argtypes = (_POINTER,) * 3 + (ctypes.c_int64,) + (_POINTER,) * 2
        self._run.restype = None
        self._page_table = config.context.page_table
        self._pool = config.context.kv_pool
        self._heads = (config.num_qo_heads, config.head_dim)
        table_stride = self._page_table.stride(0)
        sizes = (config.num_qo_heads, config.num_kv_heads, config.head_dim)
        self._requests = _Requests(
            self._page_table.data_ptr(),
            *(None, None, None),
            *(table_stride, 0, config.context.page_size, -1),
            *(*sizes, 1),
        )
        self._windows = tuple(dict.fromkeys(layer.window_left for layer in config.layers))
        self._layers: list[_Layer] = []
        for layer_id, layer in enumerate(config.layers):
            fields = _LayerFields(
                self._pool.k_cache(layer_id).data_ptr(),
                self._pool.v_cache(layer_id).data_ptr(),
                *(self._page_table.data_ptr(), table_stride, config.context.page_size),
                *(*sizes, layer.sm_scale),
            )
            is_first = all(layer.window_left != other.window_left for other in self._layers)
            address = ctypes.addressof(fields)
            self._layers.append(_Layer(fields, address, layer.window_left, is_first))
        self._workspace = torch.empty(0)
        self._workspace_size = ctypes.c_int64()

    def prepare_metadata(self, batch: Batch) -> None:
        """Plan one step from the batch's tensors, once per window."""
        plans = {window: self._plan(batch, window) for window in self._windows}
        batch.attn_metadata = NativeMetadata(plans)

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attend with the queries of one layer; see the contract."""
        layer = self._layers[layer_id]
        metadata: NativeMetadata = batch.attn_metadata
        if metadata.is_planned_by_layers and layer.is_first:
            metadata.plans[layer.window_left] = self._plan(batch, layer.window_left)
        row_stride, head_stride, _ = q.stride()
        if head_stride != self._heads[1]:
            q = q.contiguous()
            row_stride = q.stride(0)
        out = torch.empty((q.shape[0], *self._heads), dtype=torch.float32)
        self._run(
            layer.address,
            metadata.plans[layer.window_left].data_ptr(),
            q.data_ptr(),
            row_stride,
            out.data_ptr(),
            self._workspace.data_ptr(),
        )
        return out

    def init_graph(self, max_batch_size: int) -> None:
        """Need nothing: a captured step plans by itself from the batch's own tensors."""

    def prepare_for_capture(self, batch: Batch) -> None:
        """Leave the planning to the layers, inside the graph."""
        batch.attn_metadata = NativeMetadata(is_planned_by_layers=True)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Need nothing: the graph reads page table and lengths where they are."""

    def _plan(self, batch: Batch, window_left: int) -> torch.Tensor:
        """Return the plan for the layers of one window, and see to it that the workspace does."""
        assert batch.table_idx is not None, "the engine sets table_idx before the model runs"
        assert batch.seq_lens is not None, "the engine sets seq_lens before the model runs"
        assert batch.cu_seqlens_q is not None, "the engine sets cu_seqlens_q before the model runs"
        requests = self._requests
        requests.table_idx = batch.table_idx.data_ptr()
        requests.seq_lens = batch.seq_lens.data_ptr()
        requests.cu_seqlens_q = batch.cu_seqlens_q.data_ptr()
        requests.num_reqs = len(batch.seq_lens)
        requests.window_left = window_left
        requests.num_threads = torch.get_num_threads()
        plan = torch.empty(_PLAN_SIZE, dtype=torch.int32)
        size = self._fill(plan)
        if size > len(plan):
            plan = torch.empty(size, dtype=torch.int32)
            self._fill(plan)
        if self._workspace_size.value > len(self._workspace):
            self._workspace = torch.empty(self._workspace_size.value, dtype=torch.float32)
        return plan

    def _fill(self, plan: torch.Tensor) -> int:
        """Write the plan if it fits, and return its size."""
        size: int = self._make_plan(
            ctypes.addressof(self._requests),
            plan.data_ptr(),
            len(plan),
            ctypes.addressof(self._workspace_size),
        )
        return size
