"""Time decode attention on a GPU as a model's step calls it: layer after layer in a CUDA graph.

    python -m benchmarks.gpu_decode                          # ours and FlashInfer beside the floor
    python -m benchmarks.gpu_decode --tune                   # every layout of our kernel
    python -m benchmarks.gpu_decode --heads 40,8 --batches 1,64 --contexts 512

A line is one batch size, context and number of heads; times are microseconds per call. The calls
of a graph go round so many layers that no cache keeps the KV. The floor is the time to read
the KV at the bandwidth of a large copy on an H200. ``fi`` is FlashInfer's decode as the backend
``fi`` runs it, with tensor cores and without; ``ragged`` lines have lengths from 1 to twice the
context.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.devices import require_gpus
from benchmarks.gpu_attention import Case, Sizes, make_batch, make_context
from minisgl.attention.contract import AttentionBackend, AttentionConfig, LayerAttention
from minisgl.core import Batch
from minisgl.errors import MinisglError
from minisgl_kernels_cuda.attention import DecodeAttention
from minisgl_kernels_cuda.attention_plan import AttentionPlan, choose_plan
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.settings import cache_folder
from minisgl_kernels_cuda.units import Loader

BYTES_PER_US = 4.2e6
ROTATED_BYTES = 240 << 20  # several times the second-level cache
MIN_LAYERS, MAX_LAYERS = 2, 256
MIN_CALLS = 24  # of a graph, so that its start does not count
REPEATS = 7
CUDA_CORE_RATIOS = (1, 2, 3, 4, 8)  # of heads, that FlashInfer's kernel without tensor cores has
RAGGED_CONTEXT = 512
# Warps and blocks per multiprocessor; and the same with the ends of requests counted as chunks.
LAYOUTS = [
    (warps, blocks, has_ends)
    for warps, blocks in ((4, 1), (4, 2), (4, 3), (8, 1))
    for has_ends in (False, True)
]

Factory = Callable[[AttentionConfig], AttentionBackend]


def layout_factory(loader: Loader, plan: AttentionPlan | None) -> Factory:
    """Return what makes our backend with a layout, or with the usual choice."""

    def make(config: AttentionConfig) -> AttentionBackend:
        choose = choose_plan if plan is None else lambda *_: plan
        return DecodeAttention(config, loader, device_size(config.device), choose)

    return make


def flashinfer_factory(tensor_cores: str) -> Factory:
    """Return what makes FlashInfer's backend."""

    def make(config: AttentionConfig) -> AttentionBackend:
        # Imported late: FlashInfer initialises CUDA, and need not be installed.
        from minisgl_attn_flashinfer.backend import FlashInferBackend  # noqa: PLC0415
        from minisgl_attn_flashinfer.settings import FlashInferSettings  # noqa: PLC0415

        settings = FlashInferSettings.model_validate({"decode_tensor_cores": tensor_cores})
        return FlashInferBackend(replace(config, settings=settings))

    return make


def contenders(is_tuning: bool, has_flashinfer: bool) -> dict[str, Factory]:
    """Return what is timed, by the heading of its column."""
    device = torch.device("cuda", torch.cuda.current_device())
    compiler = Compiler(device_size(device).arch, cache_folder(""))
    loader = DeviceLoader(device, compiler, has_pdl=True)
    found = {"ours": layout_factory(loader, None)}
    if is_tuning:
        for layout in LAYOUTS:
            warps, blocks, has_ends = layout
            plan = AttentionPlan(warps, blocks, has_ends)
            found[f"{warps}w{blocks}b{'e' * has_ends}"] = layout_factory(loader, plan)
    if has_flashinfer:
        found |= {"fi-tc": flashinfer_factory("always"), "fi-cc": flashinfer_factory("never")}
    return found


def ragged(case: Case) -> np.ndarray:
    """Return lengths from 1 to twice the usual."""
    lens = np.linspace(1, 2 * case.seq_len - 1, case.num_reqs).astype(np.int32)
    return np.random.default_rng(0).permutation(lens)


def graph_us(backend: AttentionBackend, batch: Batch, q: torch.Tensor, num_layers: int) -> float:
    """Return the median time of a call in a graph that goes round the layers."""
    num_calls = max(num_layers, MIN_CALLS)
    backend.init_graph(batch.padded_size)
    backend.prepare_for_capture(batch)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.forward(q, 0, batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in range(num_calls):
                backend.forward(q, call % num_layers, batch)
        backend.prepare_for_replay(batch)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        graph.replay()
        for event in events:
            event.record()
            graph.replay()
        stream.synchronize()
    times: list[float] = [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]
    return statistics.median(times) * 1e3 / num_calls


def run_case(
    sizes: Sizes, case: Case, factories: dict[str, Factory], is_ragged: bool
) -> dict[str, float]:
    """Time everything on one batch; the first column is the floor."""
    kv_bytes = sizes.kv_bytes(case)
    num_layers = max(MIN_LAYERS, min(MAX_LAYERS, -(-ROTATED_BYTES // kv_bytes)))
    longest = replace(case, seq_len=2 * case.seq_len) if is_ragged else case
    context, table = make_context(sizes, longest, num_layers)
    config = AttentionConfig(
        context=context,
        num_qo_heads=sizes.num_qo_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        dtype=sizes.dtype,
        device=torch.device("cuda", torch.cuda.current_device()),
        layers=(LayerAttention(sizes.head_dim**-0.5),) * num_layers,
        max_running_reqs=case.num_reqs,
        max_seq_len=40960,
    )
    batch = make_batch(longest, table)
    if is_ragged:
        lens = ragged(case)
        assert batch.host is not None, "made with it"
        batch.host.seq_lens[:] = lens
        batch.seq_lens = torch.from_numpy(lens).cuda()
    q = torch.randn((case.num_reqs, sizes.num_qo_heads, sizes.head_dim), device="cuda")
    times = {"floor": kv_bytes / BYTES_PER_US}
    for name, factory in factories.items():
        if name == "fi-cc" and sizes.num_qo_heads // sizes.num_kv_heads not in CUDA_CORE_RATIOS:
            continue
        try:
            times[name] = graph_us(factory(config), batch, q.to(sizes.dtype), num_layers)
        except (MinisglError, RuntimeError) as error:
            print(f"# {name}: {str(error).splitlines()[0]}")
    return times


def show(label: str, times: dict[str, float]) -> None:
    """Print one line: floor, ours, FlashInfer, and with --tune the best layouts."""
    layouts = sorted((t, n) for n, t in times.items() if n[0].isdigit())
    cells = [f"{n} {times[n]:8.2f}" for n in ("floor", "ours", "fi-tc", "fi-cc") if n in times]
    best = "  ".join(f"{name} {t:.2f}" for t, name in layouts[:4])
    print(f"{label:26} {'  '.join(cells)}   {best}", flush=True)


def show_best(results: Mapping[str, Mapping[str, float]]) -> None:
    """Print for each shape and batch size which layouts come closest to the best of each line."""
    groups: dict[str, list[Mapping[str, float]]] = {}
    for label, times in results.items():
        groups.setdefault(label.partition(" x")[0], []).append(times)
    for group, lines in groups.items():
        losses: dict[str, float] = {}
        for name in (name for name in lines[0] if name[0].isdigit()):
            ratios = [
                times[name] / min(t for n, t in times.items() if n[0].isdigit())
                for times in lines
                if name in times
            ]
            losses[name] = statistics.fmean(ratios)
        order = sorted(losses, key=losses.__getitem__)
        print(f"best of {group}: " + "  ".join(f"{name} {losses[name]:.3f}" for name in order[:6]))


def numbers(text: str) -> list[int]:
    """Read a list of numbers."""
    return [int(part) for part in text.split(",")]


def cases(args: argparse.Namespace) -> Iterator[tuple[Sizes, Case, bool]]:
    """Return what is timed: heads, batch and whether lengths differ."""
    for heads, num_reqs, context in itertools.product(
        args.heads.split(":"), numbers(args.batches), numbers(args.contexts)
    ):
        num_qo, num_kv = numbers(heads)
        sizes = Sizes(num_qo, num_kv, 128, args.page_size, torch.bfloat16)
        yield sizes, Case("decode", num_reqs, context, 1), False
        if num_reqs > 1 and context == RAGGED_CONTEXT:
            yield sizes, Case("decode", num_reqs, context, 1), True


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", default="16,8:40,8:32,4", help="query and KV heads of shapes")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--contexts", default="128,512,1024,8192")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tune", action="store_true", help="time every layout of our kernel")
    parser.add_argument("--no-flashinfer", action="store_true")
    parser.add_argument("--json", type=Path, help="file to write all times to")
    args = parser.parse_args(arguments)
    require_gpus(parser)
    factories = contenders(args.tune, not args.no_flashinfer)
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, microseconds")
    results = {}
    with torch.inference_mode():
        for sizes, case, is_ragged in cases(args):
            heads = f"{sizes.num_qo_heads}/{sizes.num_kv_heads}"
            label = f"{heads} {case.num_reqs} x {case.seq_len}{' ragged' if is_ragged else ''}"
            results[label] = run_case(sizes, case, factories, is_ragged)
            show(label, results[label])
            torch.cuda.empty_cache()
    if args.tune:
        show_best(results)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
