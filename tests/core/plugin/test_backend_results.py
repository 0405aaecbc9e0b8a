"""What a backend's spec, probe and factory hand over is checked, and named where it is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from minisgl.errors import ModelError, PluginError
from minisgl.kvcache.contract import PrefixCache
from minisgl.plugin.discovery import Offer
from minisgl.plugin.lookup import availability_of
from minisgl.plugin.selection import SelectedBackend
from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec, ProbeContext
from minisgl.plugin.specs import SpecStore
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.contract import Policy, PolicyConfig, ScheduledReq
from minisgl.scheduler.named_policy import NamedPolicy
from tests.core.scheduler.harness import make_cache

SPEC = BackendSpec(api=PLUGIN_API, factory=f"{__name__}:no_arguments")
BAD_ALIASES = replace(SPEC, aliases=None)  # type: ignore[arg-type]  # on purpose
BAD_PROBE = replace(SPEC, probe="yes")  # type: ignore[arg-type]  # on purpose
SUBJECT = "policy backend 'mine' of acme-policy 1.0"


class Raises(Policy):
    """A policy that never decides."""

    def order(self, waiting: Iterable[ScheduledReq], cache: PrefixCache) -> Iterable[ScheduledReq]:
        raise RuntimeError("cannot order")

    def rank(self, req: ScheduledReq) -> tuple[int, ...]:
        raise RuntimeError("cannot rank")


class Invents(Policy):
    """A policy that names what is no request."""

    def order(self, waiting: Iterable[ScheduledReq], cache: PrefixCache) -> Iterable[ScheduledReq]:
        return [*waiting, 5]  # type: ignore[list-item]  # on purpose


def no_arguments() -> None:
    """Take no configuration, as a factory must."""


def nothing(config: PolicyConfig) -> None:
    """Make nothing."""


def refuses(config: PolicyConfig) -> None:
    """Raise an error of ours."""
    raise ModelError("not this model")


def select(factory: str) -> SelectedBackend:
    return SelectedBackend(
        kind="policy",
        name="mine",
        distribution="acme-policy",
        version="1.0",
        spec=replace(SPEC, factory=f"{__name__}:{factory}"),
        availability=Availability(ok=True),
        is_named=True,
    )


def offer(place: str) -> Offer:
    point = EntryPoint("mine", f"{__name__}:{place}", "minisgl.policy")
    return Offer("policy", "mine", "acme-policy", "1.0", point)


def make_request() -> ScheduledReq:
    return ScheduledReq(1, np.array([1, 2], np.int32), 8, SamplingParams())


def test_a_factory_that_raises_names_its_backend(caplog: pytest.LogCaptureFixture) -> None:
    wanted = f"{SUBJECT}: its factory failed: TypeError: no_arguments\\(\\) takes 0 positional"
    with caplog.at_level(logging.ERROR), pytest.raises(PluginError, match=wanted):
        select("no_arguments").build(PolicyConfig(), Policy)
    assert "takes 0 positional" in caplog.text  # the traceback


def test_a_factory_that_makes_something_else_names_its_backend() -> None:
    with pytest.raises(PluginError, match=f"{SUBJECT}: its factory made None, .* not a Policy"):
        select("nothing").build(PolicyConfig(), Policy)


def test_an_error_of_ours_passes_a_factory_as_it_is() -> None:
    with pytest.raises(ModelError, match="^not this model$"):
        select("refuses").build(PolicyConfig(), Policy)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("BAD_ALIASES", "aliases is None, which is not tuple"),
        ("BAD_PROBE", "probe is 'yes', which is not Callable"),
    ],
)
def test_a_spec_with_a_wrong_field_does_not_load(place: str, reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        SpecStore().load(offer(place))


def test_an_answer_of_a_probe_with_a_wrong_field_is_a_no() -> None:
    spec = replace(SPEC, probe=lambda context: Availability(ok=True, priority="high"))  # type: ignore[arg-type]  # on purpose
    answer = availability_of(offer("SPEC"), spec, (), ProbeContext())
    assert not answer.ok
    assert "priority is 'high', which is not int" in answer.reason


def test_a_policy_that_cannot_order_is_named() -> None:
    named = NamedPolicy(Raises(), SUBJECT)
    with pytest.raises(PluginError, match=f"{SUBJECT}: order failed: RuntimeError: cannot order"):
        list(named.order([make_request()], make_cache("radix", 1)))


def test_a_policy_that_cannot_rank_is_named() -> None:
    with pytest.raises(PluginError, match=f"{SUBJECT}: rank failed: RuntimeError: cannot rank"):
        NamedPolicy(Raises(), SUBJECT).rank(make_request())


def test_a_policy_that_names_no_request_is_named() -> None:
    named, request = NamedPolicy(Invents(), SUBJECT), make_request()
    ordered = iter(named.order([request], make_cache("radix", 1)))
    assert next(iter(ordered)) is request
    with pytest.raises(PluginError, match=f"{SUBJECT}: order has 5, no request"):
        next(ordered)
