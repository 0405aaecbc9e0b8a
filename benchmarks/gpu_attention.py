"""Time the attention backends on a GPU, one kernel call at a time.

    python benchmarks/gpu_attention.py                              # fi and fa
    python benchmarks/gpu_attention.py --backends fi,fa --json out.json
    python benchmarks/gpu_attention.py --heads 40,8 --page-sizes 16
    python benchmarks/gpu_attention.py --backends fi,fa,cuda --phase prefill

Each line is the time of one layer's call on the device, from the replay of a CUDA graph that holds
enough layers that no cache keeps their KV, beside what bounds it: the bandwidth at which a decode
reads the KV, the rate at which a prefill multiplies. ``plan`` and ``call`` are host time: of
planning one step, and of one layer's call outside a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.devices import require_gpus
from minisgl.attention.contract import AttentionBackend, AttentionConfig, LayerAttention
from minisgl.core import Batch, Context, Req, SamplingParams, StepArrays
from minisgl.device import compute_capability
from minisgl.errors import MinisglError
from minisgl.kvcache.pool import KVPool, PoolShape
from minisgl.plugin.spec import BackendSpec, ProbeContext

MIN_KV_BYTES = 512 << 20  # about ten times the second-level cache
MAX_LAYERS = 28
REPEATS = 20

Factory = Callable[[AttentionConfig], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step.

    Attributes:
        phase: ``"prefill"`` or ``"decode"``.
        num_reqs: Requests.
        seq_len: Tokens of each after the step.
        num_new: Query tokens of each.
    """

    phase: str
    num_reqs: int
    seq_len: int
    num_new: int

    def __str__(self) -> str:
        """Say it as the tables in the documentation do."""
        if self.phase == "decode":
            return f"decode {self.num_reqs} x {self.seq_len}"
        cached = self.seq_len - self.num_new
        behind = f" on {cached} cached" if cached else ""
        return f"prefill {self.num_reqs} x {self.num_new}{behind}"


CASES = [
    *(Case("decode", n, seq_len, 1) for seq_len in (1024, 8192) for n in (1, 64, 256)),
    Case("prefill", 16, 512, 512),
    Case("prefill", 64, 512, 512),
    Case("prefill", 16, 1024, 1024),
    Case("prefill", 4, 2048, 2048),
    Case("prefill", 1, 8192, 8192),
    Case("prefill", 8, 1024, 256),
    Case("prefill", 1, 8192, 16),
    Case("prefill", 4, 4096, 64),
    Case("prefill", 1, 512, 128),
]
SPECS = {
    "fi": "minisgl_attn_flashinfer.plugin:ATTENTION",
    "fa": "minisgl_attn_fa.plugin:ATTENTION",
    "cuda": "minisgl_kernels_cuda.plugin:ATTENTION",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Heads, page size and dtype of a run."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    def kv_bytes(self, case: Case) -> int:
        """Return what one layer's KV of a case takes."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return case.num_reqs * case.seq_len * per_token


@dataclass(frozen=True, slots=True)
class Result:
    """One line; times in microseconds, ``rate`` in TB/s (decode) or TFLOP/s (prefill)."""

    backend: str
    page_size: int
    case: str
    device_us: float
    rate: float
    plan_us: float
    call_us: float


def load(path: str) -> object:
    """Return the attribute that ``package.module:attribute`` names."""
    module, _, name = path.partition(":")
    found: object = getattr(import_module(module), name)
    return found


def make_context(sizes: Sizes, case: Case, num_layers: int) -> tuple[Context, np.ndarray]:
    """Fill a pool with random KV in shuffled pages; also return the host page table."""
    device = torch.device("cuda")
    pages_per_req = -(-case.seq_len // sizes.page_size)
    num_pages = case.num_reqs * pages_per_req
    shape = PoolShape(num_layers, num_pages, sizes.page_size, sizes.num_kv_heads, sizes.head_dim)
    context = Context(sizes.page_size)
    context.kv_pool = KVPool(shape, sizes.dtype, device)
    for layer_id in range(num_layers):
        context.kv_pool.k_cache(layer_id).normal_()
        context.kv_pool.v_cache(layer_id).normal_()
    table = np.full((case.num_reqs + 1, pages_per_req), num_pages, dtype=np.int32)
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    table[:-1] = order.reshape(case.num_reqs, pages_per_req)
    context.page_table = torch.from_numpy(table).to(device)
    return context, table


def make_batch(case: Case, table: np.ndarray) -> Batch:
    """Return the step with its device tensors."""
    n, none = case.num_reqs, np.empty(0, dtype=np.int32)
    rows = np.arange(n, dtype=np.int32)
    seq_lens = np.full(n, case.seq_len, dtype=np.int32)
    host = StepArrays(rows, seq_lens - case.num_new, seq_lens, none, none, none, table)
    reqs = [Req(i, none, 1, SamplingParams()) for i in range(n)]
    batch = Batch(reqs, "decode" if case.phase == "decode" else "prefill", host=host, padded_size=n)
    batch.table_idx = torch.from_numpy(rows).cuda()
    batch.seq_lens = torch.from_numpy(seq_lens).cuda()
    batch.cu_seqlens_q = torch.arange(n + 1, dtype=torch.int32, device="cuda") * case.num_new
    batch.max_seqlen_q = case.num_new
    return batch


def host_us(call: Callable[[], object]) -> float:
    """Return the median host time of a call, the device idle at its start."""
    times: list[float] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def device_us(step: Callable[[], object]) -> float:
    """Return the median time of a captured step on the device."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3


def run_case(name: str, factory: Factory, sizes: Sizes, case: Case) -> Result:
    """Time one backend on one kind of step."""
    num_layers = min(MAX_LAYERS, -(-MIN_KV_BYTES // sizes.kv_bytes(case)))
    context, table = make_context(sizes, case, num_layers)
    backend = factory(
        AttentionConfig(
            context=context,
            num_qo_heads=sizes.num_qo_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
            device=torch.device("cuda", torch.cuda.current_device()),
            layers=(LayerAttention(sizes.head_dim**-0.5),) * num_layers,
            max_running_reqs=case.num_reqs,
            max_seq_len=case.seq_len,
        )
    )
    batch = make_batch(case, table)
    num_tokens = case.num_reqs * case.num_new
    size = (num_tokens, sizes.num_qo_heads, sizes.head_dim)
    q = torch.randn(size, device="cuda").to(sizes.dtype)
    prepare = backend.prepare_metadata
    if case.phase == "decode":
        backend.init_graph(case.num_reqs)
        backend.prepare_for_capture(batch)
        prepare = backend.prepare_for_replay
    prepare(batch)

    def step() -> None:
        for layer_id in range(num_layers):
            backend.forward(q, layer_id, batch)

    step()  # compiles
    per_layer_us = device_us(step) / num_layers
    return Result(
        name,
        sizes.page_size,
        str(case),
        per_layer_us,
        rate(case, sizes, per_layer_us),
        host_us(lambda: prepare(batch)),
        host_us(lambda: backend.forward(q, 0, batch)),
    )


def rate(case: Case, sizes: Sizes, microseconds: float) -> float:
    """Return TB/s of a decode, TFLOP/s of a prefill with its causal half counted."""
    if case.phase == "decode":
        return sizes.kv_bytes(case) / microseconds / 1e6
    cached = case.seq_len - case.num_new
    pairs = case.num_reqs * (case.num_new * cached + case.num_new * (case.num_new + 1) / 2)
    return 4 * pairs * sizes.num_qo_heads * sizes.head_dim / microseconds / 1e6


def run_all(names: Sequence[str], sizes_of: Sequence[Sizes], phase: str = "") -> list[Result]:
    """Time every backend that works here, in one phase or all, printing each line as it comes."""
    results = []
    for name in names:
        spec = load(SPECS[name])
        assert isinstance(spec, BackendSpec), f"{SPECS[name]} is not a BackendSpec"
        for sizes in sizes_of:
            context = ProbeContext(
                device="cuda",
                sm=compute_capability(torch.device("cuda", 0)),
                dtype=str(sizes.dtype).removeprefix("torch."),
                head_dim=sizes.head_dim,
                page_size=sizes.page_size,
            )
            answer = spec.probe(context)
            print(f"# {name}, page size {sizes.page_size}: {answer.reason}")
            if not answer.ok:
                continue
            factory = cast("Factory", load(spec.factory))
            can = answer.capabilities or spec.capabilities
            for case in CASES:
                if phase not in ("", case.phase) or case.phase not in can.phases:
                    continue
                try:
                    result = run_case(name, factory, sizes, case)
                except MinisglError as error:
                    print(f"# {name}: {error}")
                    break
                results.append(result)
                print_result(result)
                torch.cuda.empty_cache()
    return results


def print_result(result: Result) -> None:
    """Print one line of the table."""
    unit = "TB/s" if result.case.startswith("decode") else "TFLOP/s"
    print(
        f"{result.backend:4} page {result.page_size:<4} {result.case:26} "
        f"{result.device_us:9.1f} us {result.rate:7.2f} {unit:8} "
        f"plan {result.plan_us:6.0f} us  call {result.call_us:6.0f} us",
        flush=True,
    )


def main() -> None:
    """Parse the command line, run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", default="fi,fa")
    parser.add_argument("--heads", default="16,8", help="query and KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-sizes", default="16,128")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--phase", default="", choices=("", "prefill", "decode"), help="or both")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    require_gpus(parser)
    heads = [int(part) for part in args.heads.split(",")]
    sizes_of = [
        Sizes(heads[0], heads[1], args.head_dim, int(size), getattr(torch, args.dtype))
        for size in args.page_sizes.split(",")
    ]
    print(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}, {args.heads}"
    )
    with torch.inference_mode():
        results = run_all(args.backends.split(","), sizes_of, args.phase)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
