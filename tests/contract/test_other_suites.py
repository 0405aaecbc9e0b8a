"""The suites of the other kinds catch broken backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import broken_backends as broken
from tests.contract.suite_runs import path_of, run_suite

# Kind, fault, the part of the suite that is to find it, and what it has to say.
FAULTS: list[tuple[str, type, str, str]] = [
    ("attention", broken.IgnoresTheWindow, "window", "causal attention"),
    ("attention", broken.MistakesTheWindowByOne, "window", "causal attention"),
    ("attention", broken.UsesOneScale, "window", "causal attention"),
    ("attention", broken.ScalesTheQueriesInPlace, "prefill_with", "does not change q"),
    ("attention", broken.ForgetsTheNewestToken, "decode_of", "causal attention"),
    ("attention", broken.PlansOnceForAllReplays, "captured", "causal attention"),
    ("attention", broken.ReadsOnePageTooFar, "decode_of", "causal attention"),
    ("attention", broken.KeepsItsPlanInTheClass, "share_nothing", "share nothing"),
    ("kernels", broken.AddsNoEps, "small_and_large", "computes in float32"),
    ("kernels", broken.RotatesPairs, "test_rope", "rotates q by its positions"),
    ("kernels", broken.StoresOneSlotTooFar, "store_kv", "writes its slots exactly"),
    ("kernels", broken.IgnoresTopP, "probability", "that the filters drop is never sampled"),
    ("kernels", broken.DrawsByRow, "shares", "seed and position alone"),
    ("kernels", broken.UsesTheGlobalGenerator, "same_call", "sampling is repeatable"),
    ("moe", broken.NeverRenormalizes, "number_of_tokens", "weighted sum"),
    ("moe", broken.NormalizesItsInput, "not_changed", "does not change its inputs"),
    ("moe", broken.SwapsGateAndUp, "number_of_tokens", "weighted sum"),
    ("moe", broken.SharesItsOutput, "in_any_order", "while other layers run"),
    ("policy", broken.StarvesTheLast, "", "or nothing would ever start"),
    ("policy", broken.LeavesALock, "", "leaves no lock behind"),
]


@pytest.mark.parametrize(
    ("kind", "backend", "part", "sentence"), FAULTS, ids=[fault[1].__name__ for fault in FAULTS]
)
def test_a_suite_finds_a_fault(
    tmp_path: Path, kind: str, backend: type, part: str, sentence: str
) -> None:
    failures = run_suite(tmp_path, f"{kind}:{path_of(backend)}", "-k", part)
    assert failures
    assert sentence in failures[0]
