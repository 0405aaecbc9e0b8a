"""A whole engine over the GPU plugins and fakes of their libraries, with and without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from minisgl.core import SamplingParams
from minisgl.plugin.spec import always_available
from tests.core.engine.engine_harness import StepDriver, make_engine
from tests.fakes.install_fakes import FLASHINFER, flash_attention, installed
from tests.tiny_models import TinyModel, save_tiny_model

PROMPTS = [[5, 9, 200, 31], [7] * 19, [300, 12, 4, 4, 18, 90, 66]]
NUM_TOKENS = 12
LIBRARIES = {
    "fi": ("minisgl_attn_flashinfer", FLASHINFER),
    "fa3": ("minisgl_attn_fa", flash_attention("3")),
    "fa4": ("minisgl_attn_fa", flash_attention("4")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake_libraries_model")
    save_tiny_model(folder, TinyModel(arch="qwen3", head_dim=64))
    return folder


@contextmanager
def available(name: str, folder: Path) -> Iterator[str]:
    """Install a fake library and let its backend be picked on a CPU; yields its name."""
    package, files = LIBRARIES[name]
    with installed(folder, files), pytest.MonkeyPatch.context() as patch:
        plugin = import_module(f"{package}.plugin")
        patch.setattr(plugin, "ATTENTION", replace(plugin.ATTENTION, probe=always_available))
        if name != "fi":
            patch.setattr(f"{package}.backend.compute_capability", lambda device: 90)
        yield name[:2]


def run(model: Path, attn: str, graph_size: int) -> list[list[int]]:
    engine = make_engine(
        model, attn=attn, dtype="bfloat16", cuda_graph_max_bs=graph_size, page_size=16
    )
    driver = StepDriver(engine)
    params = SamplingParams(ignore_eos=True)
    reqs = [driver.admit(i, prompt, params) for i, prompt in enumerate(PROMPTS)]
    return driver.generate(reqs, NUM_TOKENS)


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_graphs_change_no_token(name: str, model: Path, tmp_path: Path) -> None:
    with available(name, tmp_path) as attn:
        plain = run(model, attn, graph_size=0)
        # Three requests in a graph of four rows, so that padding takes part.
        captured = run(model, attn, graph_size=4)
    assert captured == plain
    # Later tokens of a random bfloat16 model are too close to call: sums are rounded differently.
    reference = run(model, "torch", graph_size=0)
    assert [tokens[:8] for tokens in plain] == [tokens[:8] for tokens in reference]
