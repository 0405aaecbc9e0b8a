"""A rank reads its own slices of the files, and not what the others need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.models.config import normalize_config
from minisgl.testing.thread_ranks import ThreadComm, run_ranks
from minisgl.weights.loader import load_weights
from minisgl.weights.safetensors_reader import SafetensorsReader
from tests.core.models.model_harness import build_model, torch_kernels
from tests.tiny_models import TinyModel, hf_config

COUNTER = Path("/proc/thread-self/io")

pytestmark = pytest.mark.skipif(not COUNTER.exists(), reason="this system counts no reads")


def bytes_read() -> int:
    """What this thread has read so far."""
    return int(COUNTER.read_text().split()[1])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_reads_its_slices_of_every_matrix(
    num_ranks: int, model_folder: Callable[[str, TinyModel], Path]
) -> None:
    # Rows of a quarter are 2 KiB: of shorter ones the whole matrix is read in one go.
    spec = TinyModel(
        "qwen3", vocab_size=1024, num_heads=32, num_kv_heads=4, head_dim=64, hidden_size=128,
        num_layers=1, extra={"intermediate_size": 2048},
    )  # fmt: skip
    folder = model_folder("wide", spec)
    config = normalize_config(hf_config(spec).to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    size = (folder / "model.safetensors").stat().st_size

    def work(comm: ThreadComm) -> int:
        model, reader = build_model(config, comm, torch_kernels()), SafetensorsReader(folder)
        before = bytes_read()
        load_weights(model.load_targets(), reader)
        return bytes_read() - before

    for count in run_ranks(num_ranks, work):
        # Norms are read by all, and the counter's own text is counted too.
        assert size / num_ranks * 0.9 < count < size / num_ranks + 8192
