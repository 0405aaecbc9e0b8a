"""Values that no recording has are refused where a trace is read, with line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import SettingsError
from minisgl.scheduler.trace_reading import read_trace
from tests.core.replay.replay_loads import Setup, record

KINDS = ("header", "arrival", "decision", "again", "ending")
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of a recording with prompts."""
    path = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    record(Setup(), path, has_prompts=True)
    return [json.loads(line) for line in path.read_text().splitlines()]


def refusal(path: Path, lines: list[dict[str, Any]], kind: str, edit: Edit) -> tuple[int, str]:
    """Edit the first line of a kind; return its number and what reading says."""
    number = next(i for i, line in enumerate(lines) if line["event"] == kind)
    changed = json.loads(json.dumps(lines[number]))
    edit(changed)
    texts = [json.dumps(changed if i == number else line) for i, line in enumerate(lines)]
    path.write_text("\n".join(texts) + "\n")
    with pytest.raises(SettingsError) as caught:
        read_trace(path)
    return number + 1, str(caught.value)


def setting(name: str, value: object) -> Edit:
    """Make an edit of one field, or of one inside another."""

    def edit(line: dict[str, Any]) -> None:
        *outer, last = name.split(".")
        for each in outer:
            line = line[each]
        line[last] = value

    return edit


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        ("arrival", "event", [], "unknown event []; known: arrival, abort"),
        ("arrival", "tick", "x", "tick 'x': must be an integer"),
        ("arrival", "tick", float("nan"), "tick nan: must be an integer"),
        ("arrival", "tick", -1, "tick -1: must be at least 0"),
        ("arrival", "tick", 2**70, f"tick {2**70}: must be at most {2**63 - 1}"),
        ("arrival", "time_s", float("inf"), "time_s inf: must be a finite number"),
        ("arrival", "uid", [], "uid []: must be an integer"),
        ("arrival", "uid", True, "uid True: must be an integer"),
        ("arrival", "prompt_len", 1.5, "prompt_len 1.5: must be an integer"),
        ("arrival", "prompt_len", 0, "prompt_len 0: must be at least 1"),
        ("arrival", "blocks", ["a"] * 50, "must be a list of"),
        ("arrival", "params", None, "params None: must be a JSON object"),
        ("arrival", "params", {"foo": 1}, "params: foo: unknown parameter; known: max_tokens"),
        ("arrival", "params", {"stop": 5}, "params: stop 5: must be a list"),
        ("arrival", "params", {"max_tokens": -5}, "params: max_tokens -5: must be an integer from"),
        ("arrival", "params", {"logit_bias": [[[], 1]]}, "must be a list of [token id, number]"),
        ("arrival", "token_ids", -1, "token_ids -1: must be a list"),
        ("arrival", "token_ids", [-1], "token_ids[0] -1: must be at least 0"),
        ("arrival", "token_ids", [10**6], "token_ids 1000000: must be below limits.vocab_size"),
        ("arrival", "token_ids", [], "token_ids []: must be a list of"),
        ("arrival", "token_ids", None, "token_ids None: must be a list, as the header's"),
        ("arrival", "color", 3, "color: unknown field"),
        ("decision", "parts", None, "parts None: must be a list"),
        ("decision", "parts", ["x"], "parts[0] 'x': must be a list"),
        ("decision", "parts", [[1, 2]], "parts[0][2]: is missing"),
        ("decision", "phase", "nap", "phase 'nap': must be 'prefill' or 'decode'"),
        ("again", "tick", 0, "tick 0: must be at least"),
        ("ending", "reason", 5, "reason 5: must be 'stop', 'length', 'abort' or 'error'"),
        ("ending", "num_cached", None, "num_cached None: must be an integer"),
        ("ending", "num_tokens", 10**6, "must be at most limits.max_seq_len, 64"),
        ("header", "limits", [], "limits []: must be a JSON object"),
        ("header", "limits.vocab_size", 0, "limits.vocab_size 0: must be at least 1"),
        ("header", "limits.num_pages", None, "limits.num_pages None: must be an integer"),
        ("header", "limits.page_size", None, "limits.page_size None: must be an integer"),
        ("header", "limits.eos_token_ids", 5, "limits.eos_token_ids 5: must be a list"),
        ("header", "settings", None, "settings None: must be a JSON object"),
        ("header", "backends", {"comm": 5}, "backends.comm 5: must be a text"),
        ("header", "block_size", 65536, "block_size 65536: must be limits.page_size"),
        ("header", "has_prompts", 1, "has_prompts 1: must be a valid boolean"),
    ],
)
def test_a_value_that_no_recording_has_is_named(
    tmp_path: Path,
    recording: list[dict[str, Any]],
    kind: str,
    name: str,
    value: object,
    said: str,
) -> None:
    path = tmp_path / "trace.jsonl"
    number, message = refusal(path, recording, kind, setting(name, value))
    assert message.startswith(f"{path}: line {number}: ")
    assert said in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_missing_is_named(
    tmp_path: Path, recording: list[dict[str, Any]], kind: str
) -> None:
    name = "version" if kind == "header" else "time_s"
    number, message = refusal(tmp_path / "t", recording, kind, lambda line: line.pop(name))
    assert message.endswith(f"line {number}: {name}: is missing")


def test_a_step_that_goes_on_needs_one_before_it(
    tmp_path: Path, recording: list[dict[str, Any]]
) -> None:
    path = tmp_path / "trace.jsonl"
    again = {"event": "again", "tick": 1, "time_s": 0}
    path.write_text(json.dumps(recording[0]) + "\n" + json.dumps(again) + "\n")
    with pytest.raises(SettingsError, match="line 2: event 'again': no decode step is before it"):
        read_trace(path)


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("[" * 200_000 + "\n")
    with pytest.raises(SettingsError, match="line 1: is no JSON: maximum recursion depth"):
        read_trace(path)
