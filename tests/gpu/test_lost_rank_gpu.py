"""A rank that is killed while its GPU works: nothing outlives it, no request goes unanswered."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.errors import WorkerError
from tests.server.pace import pace_env
from tests.tiny_models import TinyModel, save_tiny_model
from tests.tp.killed_rank import check_a_killed_rank_ends_the_server
from tests.tp.spare_clock import GONE_S, PATIENCE_S, SpareClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

MODEL = TinyModel(
    "qwen3", hidden_size=256, head_dim=128, num_heads=8, num_kv_heads=2, max_positions=2048
)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
SETTINGS = {"tp": 2, "dtype": "bfloat16", "num_pages": 512, "max_running_req": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    save_tiny_model(folder, MODEL)
    return folder


@pytest.mark.parametrize("comm", ["cuda", "torch"])
@pytest.mark.parametrize("graphs", [0, 8])
def test_a_killed_rank_ends_everything_offline(folder: Path, comm: str, graphs: int) -> None:
    llm = LLM(str(folder), comm=comm, cuda_graph_max_bs=graphs, **SETTINGS)
    (follower,) = multiprocessing.active_children()
    clocks: list[SpareClock] = []

    def kill() -> None:
        clocks.append(SpareClock())
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGKILL)

    try:
        stream = llm.stream([8, 9, 10], ENDLESS)
        threading.Timer(0.5, kill).start()
        with pytest.raises(WorkerError, match="scheduler 1 was killed by signal 9"):
            llm.generate([[5, 6, 7]] * 10_000, ENDLESS)
        follower.join(PATIENCE_S)
        assert clocks[0].stop() < GONE_S
        assert list(stream)[-1]["finish_reason"] == "error"
    finally:
        llm.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_server_with_an_error_for_every_request(
    folder: Path, tmp_path: Path, rank: int
) -> None:
    flags = ("--tp=2", "--num-pages=512")
    check_a_killed_rank_ends_the_server(folder, tmp_path, flags, pace_env(tmp_path), rank)
