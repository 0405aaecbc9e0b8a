"""`LLM(record=…)`, ``generate --record`` and ``minisgl replay`` on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.cli.main import main
from minisgl.errors import SettingsError
from minisgl.scheduler.trace import Arrival, Ending, Restart
from minisgl.scheduler.trace_reading import read_trace
from minisgl.testing.source_case import write_tiny_model

SIZES: dict[str, Any] = {  # settings of several types
    "page_size": 4,
    "num_pages": 40,
    "max_running_req": 6,
    "max_prefill_length": 16,
    "max_seq_len_override": 96,
    "attn": "torch",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("replayed") / "tiny")


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    shared = random.integers(0, 250, 20).tolist()
    return [shared + random.integers(0, 250, n).tolist() for n in (3, 9, 30, 1, 12, 7)]


def use(llm: LLM) -> None:
    """Generate, continue what was generated, and leave a stream before its end."""
    params = [
        SamplingParams(max_tokens=n, ignore_eos=bool(i % 2), stop_token_ids=(i,))
        for i, n in enumerate((20, 30, 5, 25, 18, 30))
    ]
    outputs = llm.generate(prompts(), params)
    turns = [prompts()[i] + outputs[i]["token_ids"] + [5] for i in (0, 2)]
    llm.generate(turns, SamplingParams(max_tokens=6))
    stream = llm.stream(prompts()[1], SamplingParams(max_tokens=20))
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator


@pytest.fixture(scope="module", params=[False, True], ids=["structure", "prompts"])
def trace(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A recording of `use`, with or without prompts."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    with LLM(str(model), record=path, record_prompts=request.param, **SIZES) as llm:
        use(llm)
    return path


def test_a_replay_on_the_same_parts_differs_in_nothing(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("no difference")


def test_decisions_can_be_replayed_without_the_model(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--decisions-only", "--json", "--model", "/no/such/model"]
    assert main(["replay", str(trace), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["differs"] is False
    assert report["recorded"] == report["replayed"]
    assert report["recorded"]["num_cached_tokens"] > 0
    assert report["recorded"]["finished"]["abort"] == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--cache", "naive"], "tokens before the step, cached ones included"),
        (["--page-size", "8"], "tokens before the step, cached ones included"),
        (["--max-prefill-length", "64"], "step"),
        (["--num-pages", "20"], "other requests"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_other_parts_are_named_by_the_first_step_that_differs(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    assert main(["replay", str(trace), "--decisions-only", *flags]) == 1
    out = capsys.readouterr().out
    assert out.startswith("differs at tick ")
    assert text in out.splitlines()[0]


def test_another_attention_backend_decides_the_same(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["replay", str(trace), "--attn", "auto", "--dtype", "float32", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["num_different_steps"] == 0


def test_another_model_gives_other_tokens_and_decides_the_same(
    trace: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["replay", str(trace), "--dummy-weight", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["num_different_steps"] == 0
    if read_trace(trace).header.has_prompts:
        assert code == 1
        assert report["first"]["kind"] == "token"
    else:
        assert code == 0


def test_generate_can_be_recorded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    flags = ["--record", str(path), "--max-tokens", "4", "--num-pages", "64"]
    assert main(["generate", "--model", str(model), "hello", *flags]) == 0
    assert main(["replay", str(path), "--decisions-only"]) == 0
    events = read_trace(path).events
    assert sum(isinstance(event, Arrival) for event in events) == 1
    assert sum(isinstance(event, Ending) for event in events) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FILE: is missing"),
        (["a", "b"], "FILE: one trace at a time"),
        (["nothing.jsonl"], "nothing.jsonl: cannot be read"),
    ],
)
def test_a_wrong_command_line_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["replay", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "2"], "--tp: a replay has one rank"),
        (["--record", "x"], "--record: a replay is not recorded"),
        (["--page-size", "many"], "--page-size many: must be an integer"),
    ],
)
def test_settings_that_no_replay_has_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["replay", str(trace), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--page-size", "--num-pages"])
def test_sizes_that_only_a_device_settles_are_refused_without_one(
    trace: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main(["replay", str(trace), "--decisions-only", flag, "auto"]) == 2
    assert f"{flag} auto: with --decisions-only" in capsys.readouterr().err
    assert main(["replay", str(trace), flag, "auto"]) in (0, 1)


def test_a_trace_that_cannot_be_read_or_run_is_told_from_one_that_differs(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--decisions-only", "--cache", "gone"]) == 2
    assert "cannot be replayed: " in capsys.readouterr().err
    head, line, rest = trace.read_text().split("\n", 2)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join((head, json.dumps({**json.loads(line), "tick": float("nan")}), rest)))
    assert main(["replay", str(bad), "--decisions-only"]) == 2
    assert "line 2: tick nan: must be an integer" in capsys.readouterr().err


def test_what_several_ranks_did_is_replayed_by_one(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    head, *events = trace.read_text().splitlines(keepends=True)
    header = json.loads(head)
    header["settings"]["tp"] = 2
    by_two = tmp_path / "by_two.jsonl"
    by_two.write_text(json.dumps(header) + "\n" + "".join(events))
    assert main(["replay", str(by_two)]) == 0
    assert capsys.readouterr().out.startswith("no difference")
    assert "was recorded with 2 ranks and is replayed with one" in caplog.text


def test_a_recording_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch()
    with pytest.raises(SettingsError, match="exists; name a file that does not"):
        LLM("/no/such/model", record=path)


@contextmanager
def interrupted_in(function: str) -> Iterator[None]:
    """Raise at the third call of a function, as a signal handler would."""
    calls: list[int] = []

    def trace_calls(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_name == function:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        yield
    finally:
        sys.settrace(before)


def test_an_interrupted_step_is_no_difference(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    with LLM(str(model), record=path, **SIZES) as llm:
        with pytest.raises(KeyboardInterrupt), interrupted_in("_settle"):
            llm.generate(prompts(), SamplingParams(max_tokens=8))
        use(llm)
    assert any(isinstance(event, Restart) for event in read_trace(path).events)
    code = main(["replay", str(path), "--decisions-only"])
    assert code == 0, capsys.readouterr().out
