"""Engines that stand around another show what that one is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from minisgl.engine.contract import StepEngine
from minisgl.message.wire import wire_codec
from minisgl.plugin.selection import SelectedBackend
from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec
from minisgl.replay.engine import ScriptedEngine
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.lockstep import in_lockstep
from minisgl.scheduler.record import Tap
from minisgl.testing.fake_engine import FakeEngine, make_limits
from tests.core.scheduler.test_scheduler_broadcast import WireComm


def traced(engine: StepEngine) -> StepEngine:
    return in_lockstep(engine, WireComm(0, deque()), OfflineIO(), wire_codec())[0]


def tapped(engine: StepEngine) -> StepEngine:
    return Tap(lambda event: None).attach(engine, OfflineIO())[0]


def scripted(engine: StepEngine) -> StepEngine:
    return ScriptedEngine(engine, lambda: 0)


@pytest.mark.parametrize("wrap", [traced, tapped, scripted])
def test_an_engine_around_another_shows_that_ones_attributes(
    wrap: Callable[[StepEngine], StepEngine],
) -> None:
    engine = FakeEngine(make_limits(num_pages=7))
    spec = BackendSpec(api=PLUGIN_API, factory="acme.comm:build")
    available = Availability(ok=True)
    engine.picked = (SelectedBackend("comm", "a", "acme", "1.0", spec, available, True),)
    engine.backends = {"comm": "a"}
    around = wrap(engine)
    assert around is not engine
    # All that the contract names, so that a new one with a default is not forgotten in a wrapper.
    for name in StepEngine.__annotations__:
        value = getattr(engine, name)
        assert value != getattr(StepEngine, name, None), f"set {name} to something in this test"
        assert getattr(around, name) == value, name
