from __future__ import annotations

import logging
import sys
from dataclasses import FrozenInstanceError

import pytest

from minisgl.plugin import hooks
from minisgl.plugin.hook_plugins import Implementation
from minisgl.plugin.records import EngineInfo, RequestRecord, StepRecord
from tests.core.plugin.installed import Boot

STEP = StepRecord("decode", batch_size=2, num_tokens=2, num_cached_tokens=0, duration_s=0.01)
ENGINE = EngineInfo(
    model="m",
    device="cpu",
    dtype="float32",
    vocab_size=8,
    page_size=1,
    num_pages=8,
    max_running_reqs=2,
    max_seq_len=8,
    tp_size=1,
    backends={},
    start_s=0.1,
)


def test_nobody_observing_costs_nothing(boot: Boot) -> None:
    plugins = boot(plugins="minisgl-core")
    assert hooks.step_observer(plugins.hooks) is None
    assert hooks.request_observer(plugins.hooks) is None
    assert hooks.logits_processors(plugins.hooks, ENGINE) == ()


def test_observers_are_told_and_may_take_fewer_arguments(boot: Boot) -> None:
    plugins = boot("acme-good")
    observer = hooks.step_observer(plugins.hooks)
    assert observer is not None
    observer(STEP)
    hooks.notify_engine_ready(plugins.hooks, ENGINE)
    assert sys.modules["acme_good_hooks"].SEEN == ["subcommands", STEP, "ready"]


def test_records_cannot_be_changed_by_an_observer() -> None:
    with pytest.raises(FrozenInstanceError):
        STEP.batch_size = 3  # type: ignore[misc]  # what is tested


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown-hook", "unknown hook minisgl_steps_finished; did you mean minisgl_step_finished"),
        ("wrong-argument", "Argument(s) {'record'} are declared in the hookimpl"),
        ("wrapper", "minisgl_subcommands: wrappers are not supported"),
        ("unmarked", "minisgl_step_finished is not marked with @hookimpl"),
        ("takes-a-name", "the subcommand 'plugins' is taken"),
        ("raises-when-called", "minisgl_subcommands failed: LookupError: no commands today"),
        ("no-hooks", "it implements no hook; known are minisgl_engine_ready"),
    ],
)
def test_a_bad_hook_plugin_is_left_out_with_a_warning(
    boot: Boot, caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        plugins = boot("acme-bad-hooks")
    failures = {failure.subject: failure for failure in plugins.failures}
    failure = failures[f"hook plugin '{name}'"]
    assert failure.distribution == "acme-bad-hooks"
    assert reason in failure.reason
    warnings = [message for message in caplog.messages if f"'{name}'" in message]
    assert len(warnings) == 1
    assert "acme-bad-hooks 1.0" in warnings[0]
    assert "minisgl plugins doctor" in warnings[0]


def test_nothing_of_a_bad_hook_plugin_stays_behind(boot: Boot) -> None:
    plugins = boot("acme-bad-hooks")
    assert {"left-behind", "fine"}.isdisjoint(plugins.commands)
    assert plugins.hooks.implementations("minisgl_step_finished") == []
    assert "acme-bad-hooks" not in {offer.distribution for offer in plugins.hooks.loaded}


def test_other_plugins_load_beside_bad_ones(boot: Boot) -> None:
    plugins = boot("acme-bad-hooks", "acme-raises", "acme-exits", "acme-good")
    assert plugins.commands["hello"].run == "acme_good_hooks:hello"
    assert {"generate", "plugins", "version"} <= set(plugins.commands)


def test_a_plugin_that_boots_again_does_not_go_round_for_ever(boot: Boot) -> None:
    plugins = boot("acme-bad-hooks")
    failures = {failure.subject: failure.reason for failure in plugins.failures}
    wanted = "bootstrap was called by a plugin while plugins are being loaded"
    assert wanted in failures["hook plugin 'boots-when-called'"]
    assert wanted in failures["hook plugin 'boots-at-import'"]
    assert sys.modules["acme_boots_when_called"].COUNT == 1


def test_the_traceback_of_a_failed_import_is_kept_for_the_doctor(boot: Boot) -> None:
    (failure,) = [f for f in boot("acme-raises").failures if f.distribution == "acme-raises"]
    assert "RuntimeError: the library" in failure.details
    assert "acme_raises.py" in failure.details


def test_an_observer_that_raises_is_dropped_with_one_warning(
    boot: Boot, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = boot("acme-good")
    observer = hooks.step_observer(plugins.hooks)
    assert observer is not None
    monkeypatch.setattr(sys.modules["acme_good_hooks"], "SEEN", None)
    with caplog.at_level(logging.WARNING):
        observer(STEP)
        observer(STEP)
    assert len(caplog.messages) == 1
    assert "of acme-good 1.0: AttributeError" in caplog.messages[0]


def test_a_finished_request_reaches_its_observers(boot: Boot) -> None:
    record = RequestRecord(1, "stop", 3, 0, 5, first_token_s=0.1, duration_s=0.2)
    told: list[RequestRecord] = []
    plugins = boot("acme-good")
    (offer,) = [offer for offer in plugins.hooks.loaded if offer.name == "good"]
    found = [Implementation(offer, lambda request: told.append(request))]
    hooks.Notifier[RequestRecord]("minisgl_request_finished", "request", found)(record)
    assert told == [record]
