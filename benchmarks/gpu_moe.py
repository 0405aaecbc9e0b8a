r"""Time the fused MoE on a GPU: one layer of Qwen3-30B-A3B unless told otherwise.

    python benchmarks/gpu_moe.py
    python benchmarks/gpu_moe.py --tokens 1,64 --json out.json
    python benchmarks/gpu_moe.py --flashinfer          # its cutlass_fused_moe beside ours
    python benchmarks/gpu_moe.py --tokens 4096 --in-turn    # and cuBLAS, one after the other
    python benchmarks/gpu_moe.py --num-experts 8 --top-k 2 --hidden-size 4096 \
        --intermediate-size 14336                                           # Mixtral 8x7B

Each line is the device time of one layer, from the replay of a CUDA graph whose calls together
touch far more weights than a cache holds. The floor is the larger of two times: the weights of the
experts that any token chose over the memory bandwidth, and the operations over the matrix rate;
both rates are those measured on an H200, and flags for other cards. ``torch`` is the reference
backend: tokens grouped by expert and a loop over experts, or every expert for all tokens where
there are few. The check compares with that reference in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.devices import require_gpus
from minisgl.device import compute_capability
from minisgl.moe.torch_backend import TorchMoEBackend
from minisgl_moe_triton.backend import FusedMoEBackend
from minisgl_moe_triton.bench import config_of
from minisgl_moe_triton.launch import Launcher, LayerInputs
from minisgl_moe_triton.measure import LayerBench
from minisgl_moe_triton.plan import LayerShape
from minisgl_moe_triton.tables import find_steps
from minisgl_moe_triton.workspace import Workspace

DEFAULT_TOKENS = "1,2,4,8,16,32,64,128,256,1024,4096"
MAX_CHECKED_TOKENS = 64
SQUARE = 8192
ROUNDS = 40
WARM_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Result:
    """One line.

    Attributes:
        num_tokens: Tokens of the step.
        time_us: Device time of a layer.
        floor_us: What it cannot be quicker than.
        bound: ``memory`` or ``matrix``, whichever the floor is.
        torch_us: The torch reference, its host time included.
        flashinfer_us: FlashInfer's fused MoE without the routing; NaN where not asked for.
        error: ``|out - ref| / |ref|`` against float32; NaN where not checked.
    """

    num_tokens: int
    time_us: float
    floor_us: float
    bound: str
    torch_us: float
    flashinfer_us: float
    error: float


def main() -> None:
    """Parse, time, print."""
    args = parse_arguments()
    shape = LayerShape(
        args.num_experts, args.top_k, args.hidden_size, args.intermediate_size, args.dtype
    )
    token_counts = [int(part) for part in args.tokens.split(",")]
    bench = LayerBench(shape)
    config = config_of(bench, max(token_counts), args.table)
    backend, reference = FusedMoEBackend(config), TorchMoEBackend(config)
    results = []
    for num_tokens in token_counts:
        sets = bench.inputs(num_tokens)
        work = bench.work(sets)
        floors = {
            "memory": work.num_bytes / args.tb_s * 1e-6,
            "matrix": work.flops / args.tflop_s * 1e-6,
        }
        bound = max(floors, key=lambda name: floors[name])
        result = Result(
            num_tokens=num_tokens,
            time_us=bench.time_us(lambda inputs: backend.forward(*inputs), sets),
            floor_us=floors[bound],
            bound=bound,
            flashinfer_us=time_flashinfer(bench, sets, reference) if args.flashinfer else math.nan,
            torch_us=bench.time_eager_us(lambda inputs: reference.forward(*inputs), sets),
            error=relative_error(backend, reference, sets[0]),
        )
        results.append(result)
    print_table(results, shape)
    if args.in_turn:
        print_in_turn(bench, backend, max(token_counts), args.table)
    if args.json:
        lines = [asdict(result) for result in results]
        args.json.write_text(json.dumps({"shape": asdict(shape), "rows": lines}, indent=1))


def print_in_turn(
    bench: LayerBench, backend: FusedMoEBackend, num_tokens: int, table: Path | None
) -> None:
    """Time a layer and cuBLAS in turn, then the layer's parts, and print them."""
    sets = bench.inputs(num_tokens, 4)
    flops = bench.work(sets).flops
    matrix = torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16, device=bench.device)
    layer_us, square_us = time_in_turn(
        (bench.capture(lambda inputs: backend.forward(*inputs), sets), len(sets)),
        (bench.capture(lambda _: matrix @ matrix, sets[:2]), 2),  # about as long as four layers
    )
    reached, rate = flops / layer_us * 1e-6, 2.0 * SQUARE**3 / square_us * 1e-6
    print(
        f"{num_tokens} tokens and cuBLAS {SQUARE}^3 in turn: {layer_us:.1f} us, "
        f"{reached:.0f} of {rate:.0f} TFLOP/s, {reached / rate:.1%}"
    )
    parts = parts_of(bench, sets[0], table)
    times = time_in_turn(*((bench.capture(call, sets), len(sets)) for call in parts.values()))
    each = (f"{name} {time_us:.1f} us" for name, time_us in zip(parts, times, strict=True))
    print("its parts: " + ", ".join(each))


def parts_of(
    bench: LayerBench, inputs: LayerInputs, table: Path | None
) -> dict[str, Callable[[LayerInputs], object]]:
    """Return the launches of a layer; they work on what the first of them left."""
    shape, num_tokens = bench.shape, len(inputs.hidden_states)
    sm = compute_capability(bench.device)
    steps = find_steps(shape, torch.cuda.get_device_name(), sm, table)
    step = next(each for each in steps if num_tokens <= each.max_tokens)
    workspace = Workspace(shape, steps, num_tokens, bench.device)
    launcher = Launcher(shape, True, workspace, has_overlap=sm is not None and sm >= 90)
    out = torch.empty_like(inputs.hidden_states)
    launcher.run(inputs, step, out)
    first = inputs.router_logits
    return {
        "route": lambda _: launcher.route(first, step.block_m),
        "gate and up": lambda each: launcher.gate_up(each, step),
        "down": lambda each: launcher.down(each, step),
        "sum": lambda _: launcher.combine(out),
    }


def time_in_turn(*graphs: tuple[torch.cuda.CUDAGraph, int]) -> list[float]:
    """Return the time of a call of each graph, in microseconds; the median over rounds of all.

    Args:
        graphs: Each with the number of its calls.
    """
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for (graph, num_calls), found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / num_calls)
    return [statistics.median(found[WARM_ROUNDS:]) for found in times]


def time_flashinfer(
    bench: LayerBench, sets: list[LayerInputs], reference: TorchMoEBackend
) -> float:
    """Time FlashInfer's fused MoE on the same inputs; the order of gate and up is its own."""
    # Not installed where the flag is not given.
    from flashinfer import autotune  # noqa: PLC0415
    from flashinfer.fused_moe import cutlass_fused_moe  # noqa: PLC0415

    routed = {id(each): _route(each, reference) for each in sets}
    routed = {k: (w.contiguous(), e.int().contiguous()) for k, (w, e) in routed.items()}
    out = torch.empty_like(sets[0].hidden_states)

    def call(inputs: LayerInputs) -> None:
        weights, experts = routed[id(inputs)]
        x, gate_up, down = inputs.hidden_states, inputs.gate_up_weight, inputs.down_weight
        cutlass_fused_moe(x, experts, weights, gate_up, down, x.dtype, [], output=out)

    with autotune(True):
        call(sets[0])
    return bench.time_us(call, sets)


def relative_error(
    backend: FusedMoEBackend, reference: TorchMoEBackend, inputs: LayerInputs
) -> float:
    """Compare with the reference in float32, where that is affordable."""
    # The last tokens: they are the rows of the blocks that are not full.
    last = slice(-MAX_CHECKED_TOKENS, None)
    part = inputs._replace(
        hidden_states=inputs.hidden_states[last], router_logits=inputs.router_logits[last]
    )
    out = backend.forward(*inputs)[last]
    # One expert at a time: all weights in float32 would not fit beside everything else.
    weights, experts = _route(part, reference)
    expected = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        x = part.hidden_states[token].float()
        gate, up = (x @ part.gate_up_weight[expert].float().T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ part.down_weight[expert].float().T
        expected.index_add_(0, token, y * weights[token, choice, None])
    return float((out.float() - expected).norm() / expected.norm())


def _route(inputs: LayerInputs, reference: TorchMoEBackend) -> tuple[torch.Tensor, torch.Tensor]:
    logits = inputs.router_logits.float()
    # A stable sort: of equal logits the first, as the backend does.
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, : reference._top_k]
    weights = logits.gather(1, order).softmax(dim=-1)
    return weights, order


def print_table(results: list[Result], shape: LayerShape) -> None:
    """Print what was measured."""
    print(f"{torch.cuda.get_device_name()}, {shape}")
    print(
        f"{'tokens':>7} {'us':>9} {'floor us':>9} {'bound':>7} {'share':>6} "
        f"{'torch us':>9} {'ratio':>6} {'fi us':>8} {'error':>8}"
    )
    for r in results:
        print(
            f"{r.num_tokens:>7} {r.time_us:>9.1f} {r.floor_us:>9.1f} {r.bound:>7} "
            f"{r.floor_us / r.time_us:>6.0%} {r.torch_us:>9.0f} {r.torch_us / r.time_us:>6.1f} "
            f"{r.flashinfer_us:>8.1f} "
            f"{r.error:>8.1e}"
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = {"num-experts": 128, "top-k": 8, "hidden-size": 2048, "intermediate-size": 768}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tokens", default=DEFAULT_TOKENS)
    parser.add_argument("--table", type=Path, help="table of tiles")
    parser.add_argument("--flashinfer", action="store_true", help="time FlashInfer's too")
    parser.add_argument("--in-turn", action="store_true", help="time cuBLAS beside the layer")
    parser.add_argument("--tb-s", type=float, default=4.2, help="memory bandwidth")
    parser.add_argument("--tflop-s", type=float, default=780.0, help="rate of matrix products")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpus(parser)
    return args


if __name__ == "__main__":
    main()
