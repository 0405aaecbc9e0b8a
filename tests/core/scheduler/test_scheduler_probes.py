"""What probes of the scheduler's backends hear of machine and model, whoever starts one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from minisgl import LLM
from minisgl.config.load import Settings
from minisgl.errors import PluginError
from minisgl.message.wire import wire_codec
from minisgl.parallel.followers import endpoints_in
from minisgl.plugin.manager import PluginManager
from minisgl.workers.contract import LogOptions, WorkerSpec
from minisgl.workers.scheduler import SchedulerWorker
from tests.core.plugin.throwaway import Throwaway
from tests.tiny_models import TinyModel, save_tiny_model

TELLS = Throwaway(
    "minisgl-tells",
    {
        "minisgl_tells.py": """
    from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec

    def probe(context):
        facts = (context.device, context.dtype, context.head_dim, context.page_size)
        return Availability(False, "heard of " + " ".join(map(str, facts)))

    SPEC = BackendSpec(api=PLUGIN_API, factory="minisgl_tells:none", probe=probe)
    """
    },
    {"minisgl.cache": {"tells": "minisgl_tells:SPEC"}},
)

Start = Callable[[Settings, PluginManager], object]


def start_worker(settings: Settings, manager: PluginManager) -> None:
    folder = Path(settings.model.model)
    spec = WorkerSpec(
        "scheduler", 1, pickle.dumps(settings), endpoints_in(folder), os.getpid(), LogOptions()
    )
    with zmq.Context() as context:
        SchedulerWorker(spec, settings, manager, context, wire_codec()).run(lambda _: None)


@pytest.mark.parametrize("start", [LLM.from_settings, start_worker])
def test_a_cache_is_asked_about_the_model_and_its_dtype(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, TinyModel("llama", head_dim=24))
    monkeypatch.syspath_prepend(str(TELLS.build_wheel(tmp_path)))
    manager = PluginManager.bootstrap(env={})
    settings = manager.load_settings(
        {"model": str(tmp_path), "dtype": "bfloat16", "page_size": 8, "cache": "tells", "tp": 2}
    )
    with pytest.raises(PluginError, match=r"--cache tells: .* heard of cpu bfloat16 24 8"):
        start(settings, manager)
