"""Which ranks a node has, and settings that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.config.placement import Placement
from minisgl.config.sections import EngineSettings
from minisgl.errors import SettingsError
from minisgl.plugin.manager import PluginManager


def place(**settings: Any) -> Placement:
    return Placement.of(EngineSettings(**settings))


def test_one_node_has_all_ranks_and_meets_at_a_file() -> None:
    placement = place(tp=4)
    assert list(placement.ranks) == [0, 1, 2, 3]
    assert placement.is_first
    assert placement.rendezvous("file:///x") == "file:///x"


def test_nodes_share_the_ranks_in_order() -> None:
    nodes = [place(tp=6, nnodes=3, node_rank=n, master="host:29500") for n in range(3)]
    assert [list(node.ranks) for node in nodes] == [[0, 1], [2, 3], [4, 5]]
    assert [node.is_first for node in nodes] == [True, False, False]
    assert nodes[1].local_rank(3) == 1
    assert nodes[2].rendezvous("file:///x") == "tcp://host:29500"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3, "nnodes": 2}, "--nnodes 2: must divide --tp, which is 3"),
        ({"tp": 1, "nnodes": 2}, "--nnodes 2: must divide --tp, which is 1"),
        (
            {"tp": 2, "nnodes": 2, "node_rank": 2},
            "--node-rank 2: allowed: 0 to 1, as --nnodes is 2",
        ),
        ({"node_rank": 1}, "--node-rank 1: allowed: 0 to 0"),
        ({"tp": 2, "nnodes": 2}, "--nnodes 2: needs --master HOST:PORT"),
        (
            {"tp": 2, "nnodes": 2, "master": "host:0"},
            "--master host:0: the port must be from 1 to 65535",
        ),
        ({"tp": 2, "nnodes": 2, "master": "host:70000"}, "the port must be from 1 to 65535"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        place(**settings)


@pytest.mark.parametrize(
    "master", ["host", "host:", ":29500", "a b:1", "tcp://host:1", "::1:29500"]
)
def test_a_master_that_is_no_address_is_refused(master: str) -> None:
    manager = PluginManager.bootstrap(env={})
    with pytest.raises(SettingsError, match="HOST:PORT"):
        manager.load_settings({"model": "m", "tp": 2, "nnodes": 2, "master": master})


@pytest.mark.parametrize("master", ["host:29500", "10.0.0.1:1", "[::1]:29500", "a.b-c.d:65535"])
def test_addresses_of_every_form_are_taken(master: str) -> None:
    assert place(tp=2, nnodes=2, master=master).master == master
