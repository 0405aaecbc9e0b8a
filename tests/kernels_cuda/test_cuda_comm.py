"""Collectives ``cuda`` on simulated GPUs: ranks are threads, NCCL and the driver are fakes."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import cuda.bindings
import pytest
import torch
from torch import Tensor

from minisgl.distributed.contract import CommConfig
from minisgl.distributed.control import ControlGroup
from minisgl.distributed.peers import PeerWatch
from minisgl.errors import CommError, PluginError
from minisgl.plugin.spec import ProbeContext
from minisgl_kernels_cuda import comm, plugin
from minisgl_kernels_cuda.comm import CudaCommunicator, build_communicator, limits_for
from minisgl_kernels_cuda.nccl import NcclLibrary, load_nccl
from minisgl_kernels_cuda.peer_reduce import Limits, PeerReduce
from minisgl_kernels_cuda.settings import CudaKernelSettings
from minisgl_kernels_cuda.units import ALLREDUCE, DeviceSize, Loader
from tests.cuda_sim.simulator import SimulatedLoader
from tests.fakes.peer_driver import PeerDriver
from tests.kernels_cuda.reference import assert_near, make, rms_norm

T = TypeVar("T")
CPU = torch.device("cpu")
STREAM = 0x5EA
FAKE_NCCL = Path(__file__).parent.parent / "fakes" / "nccl.cpp"


@dataclass
class Machine:
    """GPUs that do not exist."""

    driver: PeerDriver
    nccl: ctypes.CDLL
    can_access: bool = True

    def run(self, folder: Path, work: Callable[[CudaCommunicator], T], size: int = 2) -> list[T]:
        """Do something on every rank at the same time."""

        def rank(index: int) -> T:
            config = CommConfig(index, size, CPU, torch.float32, f"file://{folder}/meet", 30.0)
            made = CudaCommunicator(config)
            try:
                return work(made)
            finally:
                made.shutdown()
                made.shutdown()

        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(rank, range(size)))


@pytest.fixture(scope="session")
def nccl(loader: Loader, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The fake, built; without g++ the tests skip with ``loader``."""
    built = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(built), str(FAKE_NCCL)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(built))
    library.fake_last_stream.restype = ctypes.c_void_p
    return library


@pytest.fixture(scope="session")
def kernels(loader: Loader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated-comm")
    SimulatedLoader(folder).load(ALLREDUCE, torch.float32)  # before ranks do so side by side
    return folder


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, nccl: ctypes.CDLL, kernels: Path) -> Machine:
    """Let the backend find fakes of all that it asks for."""
    made = Machine(PeerDriver(), nccl)
    monkeypatch.setattr(cuda.bindings, "driver", made.driver, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made.driver)
    monkeypatch.setattr(comm, "load_nccl", lambda: NcclLibrary(nccl))
    monkeypatch.setattr(comm, "device_size", lambda device: DeviceSize(132, 227 << 10, "sm_90"))
    monkeypatch.setattr(comm, "Compiler", lambda arch, cache: None)
    ranks = iter(range(8))
    monkeypatch.setattr(comm, "DeviceLoader", lambda *args: SimulatedLoader(kernels, next(ranks)))
    uuids = iter(f"GPU-{i}" for i in range(100))
    for name, value in {
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_device": lambda: 0,
        "device_count": lambda: 100,
        "get_device_capability": lambda device: (9, 0),
        "get_device_properties": lambda index: SimpleNamespace(
            uuid=next(uuids) if index is None else f"GPU-{index}"
        ),
        "can_device_access_peer": lambda device, peer: made.can_access,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return made


def test_small_sums_go_through_shared_memory_and_large_ones_through_nccl(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "limits_for", lambda settings, size: Limits(4096, 8192))

    def work(made: CudaCommunicator) -> list[float]:
        sums = []
        for num_floats in (4, 1024, 1500, 2048, 2049, 5000, 3):
            x = torch.full((num_floats,), float(made.rank + 1))
            (value,) = made.all_reduce(x).unique().tolist()
            sums.append(value)
        return sums

    assert machine.run(tmp_path, work) == [[3.0] * 7] * 2
    assert machine.nccl.fake_last_stream() == STREAM
    assert machine.driver.num_mapped == 0
    assert machine.driver.blocks == {}


@pytest.mark.parametrize("way", ["sum_at_once", "sum_by_parts", "all_reduce_add_norm"])
@pytest.mark.parametrize("wrong_ranks", [(1,), (0, 1)])
def test_gpus_that_only_promise_to_share_memory_are_left_to_nccl(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    wrong_ranks: tuple[int, ...],
) -> None:
    right = getattr(PeerReduce, way)

    def sometimes_wrong(kernels: PeerReduce, x: Tensor, *args: Any) -> Any:  # Any: of either
        done = right(kernels, x, *args)
        if kernels._rank in wrong_ranks:
            for written in (x, *(done or ())[1:]):
                written += 1
        return done

    monkeypatch.setattr(PeerReduce, way, sometimes_wrong)

    def work(made: CudaCommunicator) -> list[float]:
        assert made.all_reduce_add_norm is None
        made.raise_if_broken()
        return list(made.all_reduce(torch.full((1024,), float(made.rank + 1))).unique().tolist())

    assert machine.run(tmp_path, work) == [[3.0]] * 2
    assert caplog.text.count("sums over it are wrong or took more than 10 s; all-reduce: NCCL") == 2
    assert machine.driver.blocks == {}


def test_a_trial_that_took_too_long_is_not_held_against_the_communicator(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    def too_late(kernels: PeerReduce, x: Tensor, num_pieces: int) -> None:
        address, limit_ns = struct.unpack("Pq", kernels._patience)
        limits.append(limit_ns)
        (ctypes.c_int32 * 2).from_address(address)[1] = 1  # as a kernel does

    monkeypatch.setattr(PeerReduce, "sum_at_once", too_late)
    machine.run(tmp_path, CudaCommunicator.raise_if_broken)
    assert limits == [10_000_000_000] * 2


def test_the_fused_op_is_that_of_the_kernels(machine: Machine, tmp_path: Path) -> None:
    parts = [make(3, 64, dtype=torch.float32, seed=rank) for rank in range(2)]
    residual, weight = make(3, 64, dtype=torch.float32, seed=8), make(64, dtype=torch.float32)

    def work(made: CudaCommunicator) -> tuple[Tensor, Tensor] | None:
        fused = made.all_reduce_add_norm
        assert fused is not None
        return fused(parts[made.rank].clone(), residual.clone(), weight, 1e-6)

    total = parts[0] + parts[1] + residual
    for done in machine.run(tmp_path, work):
        assert done is not None
        assert torch.equal(done[1], total)
        assert_near(done[0], rms_norm(total, weight, 1e-6))


def test_parts_of_all_ranks_are_gathered_in_order(machine: Machine, tmp_path: Path) -> None:
    def work(made: CudaCommunicator) -> list[list[float]]:
        rows: list[list[float]] = made.all_gather(
            torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + 10 * made.rank
        ).tolist()
        return rows

    assert machine.run(tmp_path, work) == [[[0, 1, 10, 11], [2, 3, 12, 13]]] * 2


def test_gpus_that_do_not_reach_each_other_use_nccl_alone(machine: Machine, tmp_path: Path) -> None:
    machine.can_access = False

    def work(made: CudaCommunicator) -> tuple[bool, list[float]]:
        return made.all_reduce_add_norm is None, made.all_reduce(torch.ones(4)).tolist()

    assert machine.run(tmp_path, work) == [(True, [2.0] * 4)] * 2
    assert machine.driver.blocks == {}


def test_three_ranks_use_nccl_alone(machine: Machine, tmp_path: Path) -> None:
    def work(made: CudaCommunicator) -> tuple[bool, list[float]]:
        return made.all_reduce_add_norm is None, made.all_reduce(torch.ones(4)).tolist()

    assert machine.run(tmp_path, work, size=3) == [(True, [3.0] * 4)] * 3


def test_a_lost_process_ends_all_waiting_with_an_error(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Callable[[], None]] = []
    is_over = threading.Event()

    def watch(self: ControlGroup, on_lost: Callable[[], None], has_processes: bool) -> PeerWatch:
        assert has_processes
        watched.append(on_lost)
        return PeerWatch([], on_lost)

    monkeypatch.setattr(ControlGroup, "watch", watch)

    def work(made: CudaCommunicator) -> str:
        made.raise_if_broken()
        if made.rank == 1:
            is_over.wait(30)  # its memory, which the other one's kernel writes, stays until then
            return "dead"
        watched_here = [lost for lost in watched if lost.__self__ is made]  # type: ignore[attr-defined]  # a method
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(made.all_reduce, torch.ones(8))
            watched_here[0]()
            assert waiting.result(timeout=30) is not None
        is_over.set()
        with pytest.raises(CommError, match="another rank is gone: its process has ended"):
            made.raise_if_broken()
        with pytest.raises(CommError, match="the communicator was aborted"):
            made.all_reduce(torch.ones(3))
        return "noticed"

    assert machine.run(tmp_path, work) == ["noticed", "dead"]


def test_a_rank_that_is_too_late_is_an_error(machine: Machine, tmp_path: Path) -> None:
    def work(made: CudaCommunicator) -> str:
        if made.rank == 1:
            return "late"
        made._verdict[1] = 1  # as the kernels do
        with pytest.raises(CommError, match="--distributed-timeout-s 30: another rank did not"):
            made.raise_if_broken()
        return "noticed"

    assert machine.run(tmp_path, work) == ["noticed", "late"]


def test_one_rank_needs_no_gpu(tmp_path: Path) -> None:
    made = build_communicator(CommConfig(0, 1, CPU, torch.float32))
    assert made.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]


def test_ranks_on_a_cpu_are_refused() -> None:
    with pytest.raises(PluginError, match="--comm cuda: joins GPUs, not cpu; use --comm torch"):
        build_communicator(CommConfig(0, 2, CPU, torch.float32))


def test_an_error_of_nccl_has_its_words(nccl: ctypes.CDLL) -> None:
    library = NcclLibrary(nccl)
    with pytest.raises(CommError, match="ncclCommInitRank failed: invalid argument"):
        library.join(library.unique_id(), 5, 2)


def test_a_missing_nccl_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_kernels_cuda.nccl.NCCL_SONAME", "libno-such-nccl.so")
    monkeypatch.setattr("minisgl_kernels_cuda.nccl.installed_nccl", lambda: None)
    with pytest.raises(PluginError, match="pip install nvidia-nccl-cu13"):
        load_nccl()


@pytest.mark.parametrize(
    ("settings", "num_ranks", "expected"),
    [
        ({"reduce_by_parts_bytes": 0, "reduce_at_once_bytes": 0}, 2, (0, 0)),
        ({"reduce_at_once_bytes": "64KiB", "reduce_by_parts_bytes": "1MiB"}, 8, (65536, 1 << 20)),
        ({"reduce_at_once_bytes": "16MiB"}, 4, (16 << 20, 16 << 20)),
        ({}, 3, (0, 0)),
    ],
)
def test_settings_say_which_sizes_our_kernels_serve(
    settings: dict[str, object], num_ranks: int, expected: tuple[int, int]
) -> None:
    assert limits_for(CudaKernelSettings.model_validate(settings), num_ranks) == expected


def test_auto_takes_it_for_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_has_cuda_core", lambda: True)
    monkeypatch.setattr(plugin, "has_nvrtc", lambda: True)
    monkeypatch.setattr(plugin, "has_nccl", lambda: True)
    gpu = ProbeContext(device="cuda", sm=90, dtype="bfloat16", tp_size=2)
    assert plugin.probe_comm(gpu).priority > 0
    assert plugin.probe_comm(ProbeContext(device="cuda", sm=90, dtype="bfloat16")).priority < 0
    assert not plugin.probe_comm(ProbeContext(tp_size=2)).ok
    monkeypatch.setattr(plugin, "has_nccl", lambda: False)
    assert "pip install nvidia-nccl-cu13" in plugin.probe_comm(gpu).reason
