"""Time all-reduce over the GPUs of a host by message size: our kernels beside NCCL.

    python -m benchmarks.gpu_allreduce                  # all GPUs, about half a minute
    python -m benchmarks.gpu_allreduce --ranks 2 --json allreduce.json

Every figure is the median of microseconds per call in a replayed CUDA graph of many calls in a
row, as in a captured decode step. The columns of the first table: our sum in one exchange and in
two, NCCL by our communicator and by torch's. Of the second, for rows of ``--hidden`` bfloat16: sum,
residual add and norm in one kernel, in two of ours, by NCCL and our norm, and the norm alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.devices import require_gpus
from minisgl.distributed.contract import CommConfig, Communicator
from minisgl.distributed.control import ControlGroup
from minisgl.distributed.torch_comm import build_communicator
from minisgl.ops.contract import KernelConfig
from minisgl_kernels_cuda.backend import CudaKernelSet
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.nccl import NcclCommunicator, load_nccl
from minisgl_kernels_cuda.peer_memory import PeerMemory, can_share
from minisgl_kernels_cuda.peer_reduce import Limits, PeerGroup, PeerReduce, memory_bytes
from minisgl_kernels_cuda.settings import CudaKernelSettings, cache_folder

BF16 = torch.bfloat16
SIZES = [2 << shift for shift in range(10, 23)]  # 2 KB to 8 MB
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NUM_CALLS = 40
Call = Callable[[], object]
Table = list[dict[str, float]]


@dataclass(frozen=True)
class Task:
    """One rank of a run."""

    rank: int
    size: int
    folder: str
    hidden: int


class Bench:
    """The communicators of one rank."""

    def __init__(self, task: Task) -> None:
        """Meet the other ranks."""
        device = torch.device("cuda", task.rank)
        torch.cuda.set_device(device)
        self.device, self.task = device, task
        self.control = ControlGroup(self._config("control"))
        library = load_nccl()
        unique_id = self.control.broadcast_bytes(None if task.rank else library.unique_id())
        self.nccl = NcclCommunicator(library, library.join(unique_id, task.rank, task.size))
        self.torch: Communicator = build_communicator(self._config("torch"))
        self.verdict = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self.ours = self._share() if can_share(self.control, device) else None
        ops = CudaKernelSet(KernelConfig(device, BF16, CudaKernelSettings())).ops()
        self.add_norm = ops["fused_add_rms_norm"]

    def _share(self) -> PeerReduce:
        task, device = self.task, self.device
        self.memory = PeerMemory(self.control, device, memory_bytes(task.size))
        group = PeerGroup(task.rank, self.memory.addresses, self.verdict.data_ptr(), 20.0)
        compiler = Compiler(device_size(device).arch, cache_folder(""))
        has_pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        loader = DeviceLoader(device, compiler, has_pdl)
        return PeerReduce(loader, BF16, group, Limits(1 << 30, 1 << 30))

    def _config(self, name: str) -> CommConfig:
        place = f"file://{self.task.folder}/{name}"
        return CommConfig(self.task.rank, self.task.size, self.device, BF16, place, 60.0)

    def stream(self) -> int:
        """Return the current stream."""
        return int(torch.cuda.current_stream().cuda_stream)

    def time(self, call: Call) -> float:
        """Return the median microseconds of a call in a graph of many."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(NUM_CALLS):
                    call()
            times = []
            for _ in range(9):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.control.min_int(0)  # all ranks begin together
                graph.replay()  # and once more, so that the host's delay is not measured
                begin.record()
                graph.replay()
                end.record()
                stream.synchronize()
                times.append(begin.elapsed_time(end) * 1000 / NUM_CALLS)
        del graph
        assert not self.verdict.any(), "a kernel has waited in vain"
        return float(statistics.median(times[2:]))

    def _nccl_sum(self, x: Tensor) -> None:
        """Let NCCL sum on the stream that is captured."""
        self.nccl.all_reduce(x, self.stream())

    def sums(self) -> Table:
        """Time sums by size."""
        lines: Table = []
        for num_bytes in SIZES:
            x = torch.zeros(num_bytes // 2, dtype=BF16, device=self.device)
            calls: dict[str, Call] = {}
            if self.ours is not None:
                calls["at once"] = partial(self.ours.sum_at_once, x, num_bytes // 16)
                calls["by parts"] = partial(self.ours.sum_by_parts, x, num_bytes // 16)
            calls["nccl"] = partial(self._nccl_sum, x)
            calls["torch"] = partial(self.torch.all_reduce, x)
            line: dict[str, float] = {"bytes": num_bytes}
            lines.append(line | {name: self.time(call) for name, call in calls.items()})
            self.show(lines)
        return lines

    def norms(self) -> Table:
        """Time sum, add and norm by number of rows."""
        lines: Table = []
        for rows in ROWS:
            x, residual = torch.zeros(2, rows, self.task.hidden, dtype=BF16, device=self.device)
            weight = torch.ones(self.task.hidden, dtype=BF16, device=self.device)
            rest = (residual, weight, 1e-6)
            calls: dict[str, Call] = {}
            if self.ours is not None:
                calls["fused"] = partial(self.ours.all_reduce_add_norm, x, *rest)
                calls["apart"] = partial(self._sum_then_norm, self.ours, x, *rest)
            calls["nccl + norm"] = partial(self._sum_then_norm, None, x, *rest)
            calls["norm alone"] = partial(self.add_norm, x, *rest)
            line: dict[str, float] = {"rows": rows, "bytes": 2 * x.numel()}
            lines.append(line | {name: self.time(call) for name, call in calls.items()})
            self.show(lines)
        return lines

    def _sum_then_norm(self, ours: PeerReduce | None, x: Tensor, *rest: Any) -> None:  # Any: mixed
        if ours is None:
            self.nccl.all_reduce(x, self.stream())
        else:
            ours.sum_at_once(x, x.numel() // 8)
        self.add_norm(x, *rest)

    def show(self, lines: Table) -> None:
        """Print the newest line, and the head with the first."""
        if self.task.rank:
            return
        if len(lines) == 1:
            print(" ".join(f"{name:>12}" for name in lines[0]))
        cells = (f"{v:12,}" if isinstance(v, int) else f"{v:12.2f}" for v in lines[-1].values())
        print(" ".join(cells), flush=True)


def run(task: Task, results: Any) -> None:  # Any: a queue
    """Measure on one rank; the entry point of a process."""
    with torch.inference_mode():
        bench = Bench(task)
        tables = {"sums": bench.sums(), "norms": bench.norms()}
    if task.rank == 0:
        results.put(tables)


def main() -> None:
    """Parse arguments, run one process per GPU and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpus(parser, max(args.ranks, 2))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        tasks = [Task(rank, args.ranks, folder, args.hidden) for rank in range(args.ranks)]
        processes = [spawn.Process(target=run, args=(task, results)) for task in tasks]
        for process in processes:
            process.start()
        tables = results.get(timeout=300)
        for process in processes:
            process.kill()  # nothing is left to do, and NCCL may wait for graphs
    if args.json:
        args.json.write_text(json.dumps(tables))


if __name__ == "__main__":
    main()
