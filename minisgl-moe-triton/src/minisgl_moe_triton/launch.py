"""Launches of the kernels, in the order of a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl_moe_triton.down_kernels import combine_kernel, down_kernel
from minisgl_moe_triton.gate_up_kernels import gate_up_kernel
from minisgl_moe_triton.plan import LayerShape, Step, TileShape
from minisgl_moe_triton.route_kernels import route_and_sort_kernel, route_kernel, sort_kernel
from minisgl_moe_triton.single_kernels import single_down_kernel, single_gate_up_kernel
from minisgl_moe_triton.workspace import Workspace

_ROUTE_ROWS = (4, 16, 64)
"""Rows of a program that routes and sorts alone: the fewest that do are taken."""

_TILE_ELEMENTS = 8192
"""Largest tile of tokens by experts that one program holds in registers."""

_COUNT_ELEMENTS = 8192
"""Counts of programs by experts that are added up at a time."""


class LayerInputs(NamedTuple):
    """What `MoEBackend.forward` gets, all of it contiguous."""

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    gate_up_weight: torch.Tensor
    down_weight: torch.Tensor


class Launcher:
    """Launches the kernels of one shape; allocates nothing and never waits for the device."""

    def __init__(
        self, shape: LayerShape, is_renormalized: bool, workspace: Workspace, has_overlap: bool
    ) -> None:
        """Keep what does not change from layer to layer.

        Args:
            shape: The layers' shape.
            is_renormalized: Whether the routing weights of a token are scaled to sum to 1.
            workspace: Buffers between the kernels.
            has_overlap: Whether a kernel may launch while the one before it ends.
        """
        self._shape = shape
        self._is_renormalized = is_renormalized
        self._ws = workspace
        self._has_overlap = has_overlap
        is_host = workspace.h.device.type == "cpu"
        halves = "upcast" if is_host and shape.dtype == "bfloat16" else "tf32"
        self._precision = "ieee" if shape.dtype == "float32" else halves
        self._most_at_once = min(64, max(1, _TILE_ELEMENTS // workspace.width))
        self._sizes = {"hidden": shape.hidden_size, "inner": shape.intermediate_size}

    def run(self, inputs: LayerInputs, step: Step, out: torch.Tensor) -> None:
        """Compute a layer.

        Args:
            inputs: Its inputs, at least one token.
            step: How to cut it up.
            out: ``[num_tokens, hidden_size]``, written.
        """
        if step.block_m == 1:
            self.single_gate_up(inputs, step.gate_up)
            self.single_down(inputs, step.down, out)
            return
        self.route(inputs.router_logits, step.block_m)
        self.gate_up(inputs, step)
        self.down(inputs, step)
        self.combine(out)

    def route(self, logits: torch.Tensor, block_m: int) -> None:
        """Choose experts for ``[num_tokens, num_experts]`` and sort the slots into blocks."""
        num_tokens = len(logits)
        if num_tokens > self._most_at_once:
            self._route_in_parts(logits, block_m)
            return
        ws, rows = self._ws, self._rows_for(num_tokens)
        blocks = (ws.block_expert, ws.block_rows, ws.num_blocks)
        route_and_sort_kernel[(1,)](
            logits, ws.weights, ws.slots, *blocks, num_tokens,
            **self._routing, block_m=block_m,
            rows=rows, width=ws.width, **self._options(_warps_of(rows * ws.width)),
        )  # fmt: skip

    def gate_up(self, inputs: LayerInputs, step: Step) -> None:
        """Compute the first product and its activation."""
        ws, tile, weight = self._ws, step.gate_up, inputs.gate_up_weight
        max_blocks = self._shape.max_blocks(len(inputs.hidden_states), step.block_m)
        columns = -(-self._shape.intermediate_size // tile.block_n)
        gate_up_kernel[(max_blocks * columns,)](
            inputs.hidden_states,
            _describe_pairs(weight, tile) if tile.has_tma else weight,
            ws.h, ws.slots, ws.weights,
            ws.block_expert, ws.block_rows, ws.num_blocks, max_blocks,
            **self._sizes, top_k=self._shape.top_k, **self._products(step, tile),
            group_m=tile.group_m, has_halves=step.has_halves,
        )  # fmt: skip

    def down(self, inputs: LayerInputs, step: Step) -> None:
        """Compute the second product."""
        ws, tile, weight = self._ws, step.down, inputs.down_weight
        blocks = (ws.block_expert, ws.block_rows, ws.num_blocks)
        half = step.block_m // 2 if step.has_halves else step.block_m
        operands: tuple[object, ...] = (ws.h, ws.h, weight)
        if tile.has_tma:
            sizes = ((ws.h, step.block_m), (ws.h, half), (weight, tile.block_n))
            operands = tuple(_describe(tensor, rows, tile.block_k) for tensor, rows in sizes)
        max_blocks = self._shape.max_blocks(len(inputs.hidden_states), step.block_m)
        columns = -(-self._shape.hidden_size // tile.block_n)
        down_kernel[(max_blocks * columns,)](
            *operands, ws.y, ws.slots, *blocks, max_blocks,
            **self._sizes, **self._products(step, tile),
            group_m=tile.group_m, has_halves=step.has_halves,
        )  # fmt: skip

    def combine(self, out: torch.Tensor) -> None:
        """Sum each token's choices into ``out``."""
        hidden = self._shape.hidden_size
        block_n = min(2048, 1 << (hidden - 1).bit_length())
        combine_kernel[(len(out), -(-hidden // block_n))](
            self._ws.y, out, hidden=hidden, top_k=self._shape.top_k, block_n=block_n,
            **self._options(min(8, max(1, block_n // 256))),
        )  # fmt: skip

    def single_gate_up(self, inputs: LayerInputs, tile: TileShape) -> None:
        """Route one token and compute its first product and activation."""
        grid = (-(-self._shape.intermediate_size // tile.block_n), self._shape.top_k)
        single_gate_up_kernel[grid](
            inputs.hidden_states, inputs.router_logits, inputs.gate_up_weight, self._ws.h,
            **self._sizes, **self._routing, block_n=tile.block_n, block_k=tile.block_k,
            stages=tile.num_stages, width=self._ws.width, **self._options(tile.num_warps),
        )  # fmt: skip

    def single_down(self, inputs: LayerInputs, tile: TileShape, out: torch.Tensor) -> None:
        """Route one token again, compute its second product and sum over its choices."""
        single_down_kernel[(-(-self._shape.hidden_size // tile.block_n),)](
            self._ws.h, inputs.router_logits, inputs.down_weight, out,
            **self._sizes, num_experts=self._shape.num_experts, top_k=self._shape.top_k,
            choices=1 << (self._shape.top_k - 1).bit_length(),
            block_n=tile.block_n, block_k=tile.block_k,
            width=self._ws.width, **self._options(tile.num_warps),
        )  # fmt: skip

    def _route_in_parts(self, logits: torch.Tensor, block_m: int) -> None:
        ws, num_tokens = self._ws, len(logits)
        programs = -(-num_tokens // ws.sort_rows)
        warps = _warps_of(ws.sort_rows * ws.width)
        part = {"rows": ws.sort_rows, "width": ws.width, **self._options(warps)}
        count_rows = min(_COUNT_ELEMENTS // ws.width, 1 << (programs - 1).bit_length())
        route_kernel[(programs,)](
            logits, ws.weights, ws.experts, ws.counts, num_tokens, **self._routing, **part
        )
        sort_kernel[(programs,)](
            ws.experts, ws.counts, ws.slots,
            ws.block_expert, ws.block_rows, ws.num_blocks, num_tokens, programs,
            top_k=self._shape.top_k, block_m=block_m, count_rows=count_rows, **part,
        )  # fmt: skip

    def _rows_for(self, num_tokens: int) -> int:
        fitting = (rows for rows in _ROUTE_ROWS if num_tokens <= rows < self._most_at_once)
        return next(fitting, self._most_at_once)

    @property
    def _routing(self) -> dict[str, Any]:  # Any: a kernel's keywords
        return {
            "num_experts": self._shape.num_experts,
            "top_k": self._shape.top_k,
            "is_renormalized": self._is_renormalized,
        }

    def _products(self, step: Step, tile: TileShape) -> dict[str, Any]:  # Any: as above
        return {
            "block_m": step.block_m,
            "block_n": tile.block_n,
            "block_k": tile.block_k,
            "has_tma": tile.has_tma,
            "precision": self._precision,
            "num_stages": tile.num_stages,
            **self._options(tile.num_warps),
        }

    def _options(self, num_warps: int) -> dict[str, Any]:  # Any: as above
        options: dict[str, Any] = {
            "num_warps": num_warps,
            "has_overlap": self._has_overlap,
            "enable_fp_fusion": True,  # the default of old versions; new ones warn
        }
        # Triton's name for programmatic dependent launch; the interpreter does not know it.
        return options | {"launch_pdl": True} if self._has_overlap else options


def _warps_of(num_elements: int) -> int:
    """Return the warps for a tile of tokens by experts: some 8 elements a thread."""
    return max(4, min(16, num_elements // 256))


def _describe(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe the rows of a contiguous tensor to the tensor memory accelerator."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), [rows, columns])


def _describe_pairs(weight: torch.Tensor, tile: TileShape) -> TensorDescriptor:
    """Describe rows of gate, and with each of them that of up, an expert's half further down."""
    num_experts, both, hidden = weight.shape
    inner = both // 2
    shape, strides = [2, num_experts * both - inner, hidden], [inner * hidden, hidden, 1]
    return TensorDescriptor(weight, shape, strides, [2, tile.block_n, tile.block_k])
