"""Print the tables behind the choices in ``minisgl.ops`` and ``minisgl.attention`` on a CPU.

    .venv/bin/python benchmarks/cpu_ops.py                   # all tables, about 3 minutes
    .venv/bin/python benchmarks/cpu_ops.py linear --rows 1,4,16
    .venv/bin/python benchmarks/cpu_ops.py attention ops

``linear`` is time over the floor: bytes of the weight over the read bandwidth measured first.
``torch`` and ``native`` are what the two kernel sets choose, ``panels``, ``dots`` and, where the
CPU has AMX, ``tiles`` the forms that ``native`` chooses from; the weights are sums of two bfloat16,
so that all forms can be had. In brackets are GFLOP/s, which count from some 16 rows on.
Enough copies of a weight are used in turn that none stays in a cache of ordinary size.
``attention`` and ``ops`` are microseconds per call. The methods of a row are timed in turn,
round by round, and medians are shown, so that a busy machine slows all of them alike: compare
along a row, not between rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.native_backend import NativeAttentionBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.ops import torch_ops
from minisgl.ops.cpu_linear import pack_linear as pack_by_torch
from minisgl.ops.native_linear import NativeLinear, fits_tiles, pack_linear
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import Step

# (out, in) of the demo model and of Qwen3-0.6B: q/k/v, o, gate/up, down, head.
SHAPES = {
    "demo": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
}
BYTES_PER_ROUND = 300e6
# (num_kv_heads, group, head_dim) of the same.
HEADS = {"demo": (3, 3, 64), "0.6b": (8, 2, 128)}
PROMPTS = [[128], [512], [2048]]
CONTEXTS = [[64], [512], [2048], [20, 22, 25], [64 + 12 * i for i in range(16)], [256] * 16]

Timed = Mapping[str, Callable[[], object]]


def time_in_turn(calls: Timed, rounds: int = 7, repeats: int = 1) -> dict[str, float]:
    """Return the median seconds of each call."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            if round_index:
                seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_read_bandwidth() -> float:
    """Return bytes per second that a product with one vector reads."""
    weights = [torch.ones(4096, 4096) for _ in range(8)]
    x = torch.ones(4096)
    seconds = time_in_turn({"": lambda: [torch.mv(weight, x) for weight in weights]})[""]
    return sum(weight.nbytes for weight in weights) / seconds


def linear_forms(weights: list[Tensor], x: Tensor) -> dict[str, Callable[[], object]]:
    """Return every way to multiply ``x`` by each of the weights."""
    by_torch = [pack_by_torch(weight) for weight in weights]
    native = [pack_linear(weight) for weight in weights]
    panels = [NativeLinear(weight, None) for weight in weights]
    dots = [NativeLinear(weight, None, "dots") for weight in weights]
    tiles = [NativeLinear(weight, None, "tiles") for weight in weights if fits_tiles(weight)]
    forms: dict[str, Callable[[], object]] = {
        "F.linear": lambda: [F.linear(x, w) for w in weights],
        "torch": lambda: [linear(x) for linear in by_torch],
        "native": lambda: [linear(x) for linear in native],
        "panels": lambda: [linear(x) for linear in panels],
        "dots": lambda: [linear(x) for linear in dots],
    }
    if tiles:
        forms["tiles"] = lambda: [linear(x) for linear in tiles]
    return forms


def make_weight(shape: tuple[int, int]) -> Tensor:
    """Make a random weight of two bfloat16 a number, as quantised ones are."""
    numbers = torch.randn(shape)
    high = numbers.bfloat16().float()
    return high + (numbers - high).bfloat16().float()


def print_linear(rows: list[int]) -> None:
    """Print time over floor of every form, by shape and number of rows."""
    bandwidth = measure_read_bandwidth()
    print(f"\nlinear: time over floor at {bandwidth / 1e9:.1f} GB/s")
    for model, shapes in SHAPES.items():
        for shape in shapes:
            count = max(1, int(BYTES_PER_ROUND / (4 * shape[0] * shape[1])))
            weights = [make_weight(shape) for _ in range(count)]
            floor = count * weights[0].nbytes / bandwidth
            for num_rows in rows:
                forms = linear_forms(weights, torch.randn(num_rows, shape[1]))
                cells = time_in_turn(forms, rounds=5)
                work = 2e-9 * num_rows * count * weights[0].numel()
                text = "  ".join(
                    f"{name} {value / floor:5.2f} ({work / value:3.0f})"
                    for name, value in cells.items()
                )
                print(f"{model} {shape[0]:>6}x{shape[1]:<4} rows {num_rows:>3}  {text}")


def print_attention() -> None:
    """Print one layer of attention by each backend: prompts, then decode steps."""
    print("\nattention: us per layer, pages of 16")
    for model, (num_kv_heads, group, head_dim) in HEADS.items():
        for is_prompt, lens in [(True, n) for n in PROMPTS] + [(False, n) for n in CONTEXTS]:
            shape = AttentionShape(
                num_kv_heads * group,
                num_kv_heads,
                head_dim,
                max_seq_len=max(lens),
                max_reqs=len(lens),
            )
            case = AttentionCase(shape)
            steps = [Step(row, 0 if is_prompt else n - 1, n) for row, n in enumerate(lens)]
            calls: dict[str, Callable[[], object]] = {}
            for name, build in (
                ("native", NativeAttentionBackend),
                ("torch", TorchAttentionBackend),
            ):
                backend = build(case.config())
                batch = case.prefill(steps) if is_prompt else case.decode(steps)
                backend.prepare_metadata(batch)
                q = case.queries(sum(lens) if is_prompt else len(lens))
                calls[name] = partial(backend.forward, q, 0, batch)
            cells = time_in_turn(calls, repeats=3 if is_prompt else 20)
            text = "  ".join(f"{name} {value * 1e6:7.0f}" for name, value in cells.items())
            what = "prompt of" if is_prompt else "requests of"
            print(f"{model} {len(lens):>2} {what} {min(lens):>4} to {max(lens):>4}  {text}")


def print_ops() -> None:
    """Print the small ops of a layer of the demo model beside the obvious other ways."""
    print("\nops: us per call")
    weight, cache = torch.randn(576), torch.randn(4096, 64)
    k_pool, v_pool = torch.zeros(4096, 3, 64), torch.zeros(4096, 3, 64)
    for num_rows in (1, 3, 16, 128):
        x, gates = torch.randn(num_rows, 576), torch.randn(num_rows, 3072)
        out, residual = torch.randn(num_rows, 576), torch.randn(num_rows, 576)
        heads = torch.randn(num_rows, 15, 64)
        q, k, v = heads[:, :9], heads[:, 9:12], heads[:, 12:]
        positions, slots = torch.arange(num_rows), torch.randperm(4096)[:num_rows]
        cos, sin = torch_ops.rope_rows(positions, cache, x.dtype)
        calls: Timed = {
            "rms_norm": partial(torch_ops.rms_norm, x, weight, 1e-5),
            "F.rms_norm": partial(F.rms_norm, x, (576,), weight, 1e-5),
            "add_rms_norm": partial(torch_ops.fused_add_rms_norm, out, residual, weight, 1e-5),
            "rope": partial(torch_ops.rope, q, k, positions, cache),
            "rope_rows": partial(torch_ops.rope_rows, positions, cache, torch.float32),
            "apply_rope": partial(torch_ops.apply_rope, heads[:, :12], cos, sin),
            "store_kv": partial(torch_ops.store_kv, k, v, k_pool, v_pool, slots),
            "silu_and_mul": partial(torch_ops.silu_and_mul, gates),
        }
        cells = time_in_turn(calls, repeats=100)
        text = "  ".join(f"{name} {value * 1e6:.1f}" for name, value in cells.items())
        print(f"rows {num_rows:>3}  {text}")


def main() -> None:
    """Parse the command line and print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help="linear, attention, ops; all when left out")
    parser.add_argument("--rows", default="1,2,3,4,8,16,32,64,128,512")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    tables = args.tables or ["linear", "attention", "ops"]
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        if "ops" in tables:
            print_ops()
        if "attention" in tables:
            print_attention()
        if "linear" in tables:
            print_linear([int(rows) for rows in args.rows.split(",")])


if __name__ == "__main__":
    main()
