"""Time products of decode batches on a GPU: our kernels in every form, cuBLAS, and the floor.

    python -m benchmarks.gpu_linear                  # as the table of linear_table.py chooses
    python -m benchmarks.gpu_linear --tune           # every form that may be good; about 2 minutes
    python -m benchmarks.gpu_linear --many           # of a prefill or a large batch
    python -m benchmarks.gpu_linear --many --chosen  # what the engine takes, and plain cuBLAS

Every figure is microseconds per product in a replayed CUDA graph that goes round several copies
of the weight, so that it comes from memory. ``floor`` is the bytes of the weight and the rows over
``--bandwidth``. ``layer`` is a decode layer without attention, 28 (14B: 4) layers in one graph:
there products overlap with the small kernels beside them, and forms compete for shared memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.devices import require_gpus
from benchmarks.kernel_timing import BF16, DEVICE, copies, qkv_inputs, randn, time_graph
from benchmarks.many_products import time_many
from minisgl.ops.contract import GatedActivation, PackedLinear
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.linear import LinearKernels
from minisgl_kernels_cuda.linear_plans import (
    FEW_ROWS,
    BatchPlan,
    FewPlan,
    Plan,
    has_kernel,
    kernel_rows,
)
from minisgl_kernels_cuda.linear_table import batch_rule, fill
from minisgl_kernels_cuda.norm import Norms
from minisgl_kernels_cuda.qkv import QKVStage
from minisgl_kernels_cuda.settings import cache_folder
from minisgl_kernels_cuda.units import DeviceSize, Loader

Shape = tuple[int, int]
Times = dict[Plan | None, float]  # None: cuBLAS
NUM_KEPT = 4  # forms of a product that are tried in a layer


class Model(NamedTuple):
    """What a layer is made of.

    Attributes:
        products: Outputs and inputs of q/k/v, o, gate and up, down.
        head: The same of the vocabulary.
        num_q: Query heads of 128; there are 8 KV heads.
        num_layers: Of a timed graph.
    """

    products: tuple[Shape, Shape, Shape, Shape]
    head: Shape
    num_q: int
    num_layers: int


MODELS = {
    "0.6b": Model(((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), (151936, 1024), 16, 28),
    "14b": Model(((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)), (151936, 5120), 40, 4),
}


class FixedKernels(LinearKernels):
    """Kernels that take the plans of ``fixed``, and the table's for other weights.

    Attributes:
        fixed: By outputs and inputs; ``None`` for cuBLAS.
    """

    def __init__(self, loader: Loader, device: DeviceSize) -> None:
        """Load the kernels."""
        super().__init__(loader, BF16, device, 128, build_activations(loader, BF16))
        self.fixed: dict[Shape, Plan | None] = {}

    def choose(self, n: int, k: int, rows: int) -> Plan | None:
        """Return the plan that is tried, for the rows that it has a kernel for."""
        if (n, k) not in self.fixed:
            return super().choose(n, k, rows)
        plan = self.fixed[n, k]
        return plan if plan is not None and has_kernel(plan, rows) else None


class Bench:
    """Loads the kernels, times them, and keeps what it found.

    Attributes:
        products: Times by rows and shape.
        layers: Lines of the layer table.
    """

    def __init__(self, bandwidth: float) -> None:
        """Compile and load."""
        self.device = device_size(DEVICE)
        loader = load()
        self.kernels = FixedKernels(loader, self.device)
        norms, activations = Norms(loader, BF16), build_activations(loader, BF16)
        self._fused_add_rms_norm = norms.fused_add_rms_norm
        self._qkv_stage = QKVStage(loader, BF16).qk_norm_rope_store
        self._silu_and_mul = activations["silu_and_mul"]
        self._bandwidth = bandwidth
        self.products: dict[tuple[int, Shape], Times] = {}
        self.layers: list[dict[str, Any]] = []

    def time_products(self, shape: Shape, rows_list: Sequence[int], is_tuned: bool) -> None:
        """Time a weight with every number of rows and print a line for each."""
        n, k = shape
        weights = [randn(n, k) for _ in range(copies(2.0 * n * k))]
        for rows in rows_list:
            x = randn(rows, k)
            floor = self.floor(rows, shape)
            num_calls = max(6, min(64, int(300 / floor)))
            cublas = time_graph([partial(F.linear, x, w) for w in weights], num_calls)
            times: Times = {None: cublas}
            for plan in self._plans(shape, rows, is_tuned):
                self.kernels.fixed[shape] = plan
                packed = [self.kernels.pack_linear(w, None) for w in weights]
                times[plan] = time_graph([partial(p, x) for p in packed], num_calls)
            self.kernels.fixed.pop(shape, None)
            self.products[rows, shape] = times
            best = [(plan, us) for plan, us in ranked(times) if plan is not None][:NUM_KEPT]
            found = "  ".join(f"{show(plan)} {us:.2f}" for plan, us in best)
            print(f"{rows:4} x {n} x {k}: floor {floor:.2f} cublas {cublas:.2f} | {found}")

    def floor(self, rows: int, shape: Shape) -> float:
        """Return the microseconds that the bytes of a product need."""
        n, k = shape
        return 2.0 * (n * k + rows * (n + k)) / self._bandwidth * 1e6

    def _plans(self, shape: Shape, rows: int, is_tuned: bool) -> list[Plan]:
        """Return what to try."""
        n, k = shape
        bucket = -(-rows // 4) * 4
        if bucket > 128:
            return []
        chosen = self.kernels.choose(n, k, bucket)
        if not is_tuned:
            return [] if chosen is None else [chosen]
        few = list(few_plans(n, k, self.device)) if rows <= FEW_ROWS[-1] else []
        return list(dict.fromkeys([*few, *batch_plans(n, k, rows, self.device)]))

    def time_layer(self, name: str, rows: int, is_tuned: bool) -> None:
        """Time a layer by cuBLAS and by our kernels; tune its products one after another."""
        model = MODELS[name]
        weights = [
            [randn(n, k) / k**0.5 for n, k in model.products] for _ in range(model.num_layers)
        ]
        time_with = partial(self._layer_time, model, weights, rows)
        line: dict[str, Any] = {"model": name, "rows": rows}
        self.kernels.fixed = dict.fromkeys(model.products)
        line["cublas"] = time_with(is_fused=False)
        self.kernels.fixed = {}
        if is_tuned:
            self._tune_layer(model, rows, time_with)
        line["ours"] = time_with(is_fused=True)
        line["not fused"] = time_with(is_fused=False)
        line["plans"] = [
            show(self.kernels.choose(n, k, -(-rows // 4) * 4)) for n, k in model.products
        ]
        line["floor"] = sum(self.floor(rows, shape) for shape in model.products)
        self.kernels.fixed = {}
        self.layers.append(line)
        cells = {k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}
        print("layer", json.dumps(cells), flush=True)

    def _tune_layer(self, model: Model, rows: int, time_with: Callable[..., float]) -> None:
        """Leave in ``fixed`` what is quickest in the layer, of the quickest ones alone."""
        times = {shape: self.products[rows, shape] for shape in model.products}
        self.kernels.fixed = {shape: ranked(t)[0][0] for shape, t in times.items()}
        best_us = time_with(is_fused=True)
        for shape, alone in times.items():
            best = self.kernels.fixed[shape]
            for plan in [None, *(p for p, _ in ranked(alone)[:NUM_KEPT])]:
                self.kernels.fixed[shape] = plan
                us = time_with(is_fused=True)
                if us < best_us:
                    best, best_us = plan, us
            self.kernels.fixed[shape] = best

    def _layer_time(
        self, model: Model, weights: list[list[Tensor]], rows: int, is_fused: bool
    ) -> float:
        """Return microseconds of one layer."""
        hidden = model.products[0][1]
        layers = [self._pack_layer(w, is_fused) for w in weights]
        scale, inputs = randn(hidden), qkv_inputs(rows, model.num_q, 8)
        x0, residual = randn(rows, hidden), randn(rows, hidden)

        def step() -> None:
            x, total = x0, residual
            for qkv, o, gate_up, down in layers:
                x, total = self._fused_add_rms_norm(x, total, scale, 1e-6)
                q = self._qkv_stage(qkv(x), inputs)
                x, total = self._fused_add_rms_norm(o(q.flatten(1)), total, scale, 1e-6)
                x = down(gate_up(x))

        return time_graph([step], 1) / model.num_layers

    def _pack_layer(self, weights: list[Tensor], is_fused: bool) -> list[Callable[..., Tensor]]:
        qkv, o, gate_up, down = weights
        pack = self.kernels.pack_linear
        packed: list[Callable[..., Tensor]] = [pack(w, None) for w in (qkv, o, down)]
        gated: PackedLinear
        if is_fused:
            activation: GatedActivation = "silu"
            gated = self.kernels.pack_gated_linear(gate_up, None, activation)
            return [*packed[:2], gated, packed[2]]
        plain = pack(gate_up, None)
        return [*packed[:2], lambda x: self._silu_and_mul(plain(x)), packed[2]]


def load() -> DeviceLoader:
    """Return where kernels come from."""
    return DeviceLoader(DEVICE, Compiler(device_size(DEVICE).arch, cache_folder("")), True)


def ranked(times: Times) -> list[tuple[Plan | None, float]]:
    """Return plans, the quickest first."""
    return sorted(times.items(), key=lambda item: item[1])


def show(plan: Plan | None) -> str:
    """Return a plan in few letters: few groups x blocks, or batch groups/splits/w slots/x slots."""
    if plan is None:
        return "cublas"
    if isinstance(plan, FewPlan):
        return f"few{plan.groups}x{plan.num_blocks}"
    return f"{plan.groups}/{plan.splits}/{plan.w_slots}/{plan.x_slots}"


def few_plans(n: int, k: int, device: DeviceSize) -> Iterator[FewPlan]:
    """Yield forms for few rows that may be good."""
    for groups in (1, 2):
        tiles = -(-n // (8 * groups))
        for i in (1, 2, 4):
            yield FewPlan(groups, min(tiles, device.num_sms * i))
        if tiles < device.num_sms * 16 or k <= 1024:
            yield FewPlan(groups, tiles)


def batch_plans(n: int, k: int, rows: int, device: DeviceSize) -> Iterator[BatchPlan]:
    """Yield forms for a batch that may be good: few enough blocks, each with enough to do."""
    size = kernel_rows(rows)
    yield batch_rule(n, k, rows, device)
    for groups, splits, blocks_per_sm, x_slots in product(
        (1, 2), (1, 2, 4, 8), (1, 2, 3, 4), (2, 4)
    ):
        plan = fill(groups, splits, blocks_per_sm, (k, size), device, x_slots)
        if not has_kernel(plan, rows):
            continue
        num_blocks = plan.num_blocks(n)
        is_enough = num_blocks >= device.num_sms // 2 or (groups == 1 and splits == 8)
        is_few = splits == 1 or num_blocks <= 8 * device.num_sms
        if is_enough and is_few and plan.shared_bytes(size) <= device.max_shared_bytes - 20 * 1024:
            yield plan


def save(bench: Bench, path: Path) -> None:
    """Write all times."""
    products = [
        {
            "rows": rows, "shape": shape,
            "times": [[None if p is None else asdict(p), us] for p, us in ranked(times)],
        }
        for (rows, shape), times in bench.products.items()
    ]  # fmt: skip
    path.write_text(json.dumps({"products": products, "layers": bench.layers}, indent=1))


def print_table(bench: Bench, shapes: Sequence[Shape], rows_list: Sequence[int]) -> None:
    """Print ours / cuBLAS / floor by shape and rows; ours is the best where it was tuned."""
    print(f"{'outputs x inputs':16}", *(f"{rows:>19}" for rows in rows_list))
    for shape in shapes:
        cells = []
        for rows in rows_list:
            times: Mapping[Plan | None, float] = bench.products[rows, shape]
            ours = min((us for plan, us in times.items() if plan is not None), default=float("nan"))
            cells.append(f"{ours:6.2f}/{times[None]:6.2f}/{bench.floor(rows, shape):5.1f}")
        print(f"{shape[0]:>8} x {shape[1]:<5}", *cells)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4,8,16,24,32,48,64,96,128,256")
    parser.add_argument("--layer-rows", default="1,8,16,32,48,64,96,128")
    parser.add_argument("--models", default="0.6b,14b")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--many", action="store_true", help="time products of --many-rows instead")
    parser.add_argument("--many-rows", default="512,2048,8192")
    parser.add_argument("--chosen", action="store_true", help="with --many: as the engine chooses")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn under load")
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes per second")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.chosen and not args.many:
        parser.error("--chosen goes with --many")
    require_gpus(parser)
    if args.many:
        many_rows = [int(r) for r in args.many_rows.split(",")]
        for name in args.models.split(","):
            time_many(load(), MODELS[name].products, many_rows, args.seconds, args.chosen)
        return
    started = time.perf_counter()
    bench = Bench(args.bandwidth)
    print(f"loaded in {time.perf_counter() - started:.1f} s", flush=True)
    rows_list = [int(r) for r in args.rows.split(",")]
    layer_rows = [int(r) for r in args.layer_rows.split(",")]
    for name in args.models.split(","):
        model = MODELS[name]
        shapes = (*model.products, model.head)
        for shape in shapes:
            bench.time_products(shape, rows_list, args.tune)
        for rows in layer_rows:
            bench.time_layer(name, rows, args.tune)
        print_table(bench, shapes, rows_list)
        print(f"{name} done after {time.perf_counter() - started:.1f} s", flush=True)
        if args.json:
            save(bench, args.json)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
