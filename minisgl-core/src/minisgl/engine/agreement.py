"""Whether the nodes of a group were started with the same settings."""

from __future__ import annotations

import json

import torch

from minisgl.config.load import Settings
from minisgl.config.sections import BackendSettings, EngineSettings, SchedulerSettings
from minisgl.distributed.contract import Communicator
from minisgl.errors import SettingsError

# What may differ from node to node.
_OWN = {"device", "node_rank", "master", "cpu_kv_cache_bytes", "memory_ratio"}


def check_nodes_agree(comm: Communicator, settings: Settings, dtype: torch.dtype) -> None:
    """Compare this rank's settings with those of rank 0; all ranks call it.

    Each node reads its own command line, and ranks that decide by other rules would part.

    Raises:
        SettingsError: They differ; the message names the first one.
    """
    sections = (BackendSettings, EngineSettings, SchedulerSettings)
    mine = {"dtype": str(dtype).removeprefix("torch.")}
    for section in sections:
        mine |= settings.section(section).model_dump(mode="json", exclude=_OWN)
    sent = json.dumps(mine).encode() if comm.rank == 0 else None
    first = json.loads(comm.broadcast_bytes(sent))
    for name in mine.keys() | first.keys():
        if mine.get(name) != first.get(name):
            raise SettingsError(
                f"--{name.replace('_', '-')} {_shown(mine.get(name))}: node 0 has "
                f"{_shown(first.get(name))}, and all nodes need the same"
            )


def _shown(value: object) -> object:
    return "auto" if value is None else value
