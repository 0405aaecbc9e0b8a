"""A model source with which rank 1 fails while rank 0 takes its time to read a tensor."""

from __future__ import annotations

from pathlib import Path

from tests.core.plugin.throwaway import Throwaway

MODULE = "minisgl_stuck"
"""Of the source ``stuck``.

``READ`` holds names of tensors. Reading one computes until the event ``MAY_GO_ON`` is set, or for
as many seconds as the variable ``STUCK_S`` says.
"""

_STUCK = Throwaway(
    "minisgl-stuck",
    {
        f"{MODULE}.py": """
    import multiprocessing
    import os
    import threading
    import time
    from pathlib import Path

    from minisgl.errors import ModelError
    from minisgl.plugin.spec import PLUGIN_API, BackendSpec
    from minisgl.weights.contract import ModelSource
    from minisgl.weights.local import FolderFiles

    READ, MAY_GO_ON = [], threading.Event()

    class Files(FolderFiles):
        def open_weights(self):
            if multiprocessing.parent_process() is not None:
                raise ModelError("rank 1 cannot read")
            reader = super().open_weights()
            read = reader.read

            def read_slowly(name, index):
                READ.append(name)
                compute()
                return read(name, index)

            reader.read = read_slowly
            return reader

    def compute():
        import torch

        end = time.monotonic() + float(os.environ.get("STUCK_S", "300"))
        some = torch.ones(300, 300)
        while not MAY_GO_ON.is_set() and time.monotonic() < end:
            some @ some

    class Source(ModelSource):
        def __init__(self, config):
            pass

        def accepts(self, model):
            return False

        def open(self, model):
            return Files(Path(model), "stuck")

    SOURCE = BackendSpec(api=PLUGIN_API, factory="minisgl_stuck:Source")
    """
    },
    {"minisgl.source": {"stuck": "minisgl_stuck:SOURCE"}},
)


def stuck_wheel(folder: Path) -> Path:
    """Make what has to be on the path of processes that load by ``--model-source stuck``."""
    return _STUCK.build_wheel(folder)
