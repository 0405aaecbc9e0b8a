"""Trace files: what is in them, who may read them, and what becomes of damaged ones."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import numpy as np
import pytest

from minisgl.engine.contract import EngineLimits
from minisgl.errors import SettingsError
from minisgl.message.types import UserMsg
from minisgl.plugin.manager import PluginManager
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.record import PrefixNames, Tap
from minisgl.scheduler.recorder import Recorder
from minisgl.scheduler.trace import (
    Again,
    Arrival,
    Decision,
    End,
    Event,
    Part,
    encode_line,
)
from minisgl.scheduler.trace_reading import read_trace
from minisgl.testing.fake_engine import FakeEngine, make_limits
from tests.core.replay.replay_loads import Setup, record

PROMPT = np.arange(40, 61, dtype=np.int32)
SECRET = SamplingParams(max_tokens=5, stop=("a secret",), logit_bias={77: 1.0}, temperature=0.5)


def make_recorder(path: Path, **settings: object) -> Recorder:
    manager = PluginManager.bootstrap({"MINISGL_PLUGINS": ""})
    filled = manager.load_settings({"model": "none", "record": path, **settings}, env={})
    made = Recorder.of(filled)
    assert made is not None
    return made


def arrival_of(names: PrefixNames, prompt: np.ndarray, *, has_prompts: bool = False) -> Arrival:
    events: list[Event] = []
    line = OfflineIO()
    tap = Tap(events.append, names, has_prompts=has_prompts)
    _, tapped = tap.attach(FakeEngine(make_limits()), line)
    line.put([UserMsg(3, prompt, SECRET)])
    tapped.receive(block=False)
    (event,) = events
    assert isinstance(event, Arrival)
    return event


def test_without_prompts_a_trace_holds_no_token_and_no_text() -> None:
    event = arrival_of(PrefixNames(4), PROMPT)
    text = encode_line(event).decode()
    assert event.token_ids is None
    assert event.params == {"max_tokens": 5, "temperature": 0.5}
    assert "secret" not in text
    assert "77" not in json.dumps(event.params)


def test_with_prompts_it_holds_everything() -> None:
    event = arrival_of(PrefixNames(4), PROMPT, has_prompts=True)
    assert event.token_ids == PROMPT.tolist()
    assert event.params["stop"] == ("a secret",)
    assert event.params["logit_bias"] == [(77, 1.0)]


def test_prompts_have_as_many_equal_names_as_blocks_in_common() -> None:
    names = PrefixNames(4)
    other = PROMPT.copy()
    other[9] += 1
    first, second = arrival_of(names, PROMPT).blocks, arrival_of(names, other).blocks
    assert len(first) == len(second) == 5
    assert first[:2] == second[:2]
    assert not {*first[2:]} & {*second[2:]}


def test_names_of_two_recordings_cannot_be_compared() -> None:
    first, second = (arrival_of(PrefixNames(4), PROMPT).blocks for _ in range(2))
    assert not {*first} & {*second}


def test_decode_steps_of_the_same_requests_are_short(tmp_path: Path) -> None:
    trace = record(Setup(), tmp_path / "trace.jsonl")
    lines = (tmp_path / "trace.jsonl").read_bytes().splitlines()
    again = [line for line in lines if json.loads(line)["event"] == "again"]
    assert again
    assert max(map(len, again)) < 60
    # A reader sees them as what they stand for.
    assert not any(isinstance(event, Again) for event in trace.events)
    decodes = [e for e in trace.events if isinstance(e, Decision) and e.phase == "decode"]
    assert len(decodes) > len(again)
    assert all(isinstance(part, Part) for step in decodes for part in step.parts)


def test_a_last_line_that_was_cut_off_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    whole = record(Setup(), path)
    path.write_bytes(path.read_bytes()[:-7])
    with caplog.at_level(logging.WARNING):
        trace = read_trace(path)
    assert "the last line is cut off" in caplog.text
    assert trace.events == whole.events[:-1]
    assert whole.is_complete
    assert not trace.is_complete


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"event":"head', "cut off before its first line ended"),
        (b"[1]\n", "line 1: is no JSON object"),
        (b"hello\n", "line 1: is no JSON"),
        (b'{"event":"end","tick":1,"time_s":0}\n', "its first line is no header"),
        (b'{"event":"header","format":99}\n', "of format 99; this version reads 1"),
        (b'{"event":"header","format":1}\n', "line 1: .*missing"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"event":"nap","tick":1}\n', "line 2: unknown event 'nap'"),
        (b'{"event":"flush","tick":1,"time_s":0,"color":3}\n', "line 2: .*color"),
        (b"{}{}\n", "line 2: is no JSON"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    record(Setup(), path)
    head, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(head + b"\n" + line + rest)
    with pytest.raises(SettingsError, match=message):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nothing.jsonl: cannot be read"):
        read_trace(tmp_path / "nothing.jsonl")


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    with pytest.raises(SettingsError, match="--record .*trace.jsonl: exists"):
        make_recorder(path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no folder"):
        make_recorder(tmp_path / "nowhere" / "trace.jsonl")


def test_recording_prompts_needs_a_file() -> None:
    manager = PluginManager.bootstrap({"MINISGL_PLUGINS": ""})
    filled = manager.load_settings({"model": "none", "record_prompts": True}, env={})
    with pytest.raises(SettingsError, match="--record-prompts: goes with --record FILE"):
        Recorder.of(filled)


@pytest.fixture
def limits() -> EngineLimits:
    return make_limits(eos_token_ids=frozenset({3, 9}))


def test_a_file_is_for_its_owner_and_every_line_is_there_at_once(
    tmp_path: Path, limits: EngineLimits
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder, line = make_recorder(path), OfflineIO()
    _, tapped = recorder.attach(FakeEngine(limits), line, {"cache": "radix"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    line.put([UserMsg(0, PROMPT, SamplingParams())])
    tapped.receive(block=False)
    trace = read_trace(path)  # nobody has closed it
    assert trace.header.limits.eos_token_ids == [3, 9]
    assert trace.header.backends == {"cache": "radix"}
    assert trace.header.settings["cache"] == "radix"
    assert len(trace.events) == 1
    recorder.close()
    recorder.close()
    assert isinstance(read_trace(path).events[-1], End)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path,
    limits: EngineLimits,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder, line = make_recorder(tmp_path / "trace.jsonl"), OfflineIO()
    _, tapped = recorder.attach(FakeEngine(limits), line, {})

    def full(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minisgl.scheduler.recorder.os.write", full)
    for uid in range(3):
        line.put([UserMsg(uid, PROMPT, SamplingParams())])
        assert len(tapped.receive(block=False)) == 1
    assert caplog.text.count("ends here, it cannot be written") == 1
    recorder.close()
