"""The suites of the other kinds catch broken backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import broken_backends as broken
from tests.contract import broken_policies
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
    ("attention", broken.ReadsWholeVectors, "unusual", "causal attention"),
    ("attention", broken.WritesWhereItLikes, "forward_into", "causal attention"),
    ("attention", broken.RefusesInItsOwnWords, "unusual", "refuses it with a MinisglError"),
    ("kernels", broken.AddsNoEps, "small_and_large", "computes in float32"),
    ("kernels", broken.NormsInPlace, "test_rms_norm", "does not change x"),
    ("kernels", broken.LosesTheResidual, "fused_add", "as its second result"),
    ("kernels", broken.TakesOneGeluForTheOther, "gated_act", "gelu_and_mul gates"),
    ("kernels", broken.LaunchesAnEmptyGrid, "no_row", "invalid configuration argument"),
    ("kernels", broken.LooksUpWhatOthersHave, "embedding", "gives zeros for others"),
    ("kernels", broken.RotatesPairs, "test_rope", "rotates q by its positions"),
    ("kernels", broken.StoresOneSlotTooFar, "store_kv", "writes its slots exactly"),
    ("kernels", broken.IgnoresTopP, "probability", "that the filters drop is never sampled"),
    ("kernels", broken.DrawsByRow, "shares", "seed and position alone"),
    ("kernels", broken.UsesTheGlobalGenerator, "same_call", "sampling is repeatable"),
    ("moe", broken.NeverRenormalizes, "number_of_tokens", "weighted sum"),
    ("moe", broken.NormalizesItsInput, "not_changed", "does not change its inputs"),
    ("moe", broken.RoutesAtLeastOne, "no_token", "forward of no tokens gives no rows"),
    ("moe", broken.RemembersTheRouter, "captured", "what is in the inputs now"),
    ("moe", broken.SwapsGateAndUp, "number_of_tokens", "weighted sum"),
    ("moe", broken.SharesItsOutput, "in_any_order", "while other layers run"),
    ("policy", broken_policies.StarvesTheLast, "", "or nothing would ever start"),
    ("policy", broken_policies.LeavesALock, "", "leaves no lock behind"),
    ("policy", broken_policies.NamesSomebodyTwice, "", "returns no request twice"),
    ("policy", broken_policies.InventsARequest, "only", "returns requests that wait"),
    ("policy", broken_policies.DrawsLots, "", "every rank gets the same order"),
    ("policy", broken_policies.AgesRequests, "", "does not change requests"),
    ("policy", broken_policies.ForgetsPrefixes, "", "does not change the cache"),
    ("policy", broken_policies.RanksByPriority, "", "no two requests have the same rank"),
    ("policy", broken_policies.RanksByLength, "", "a request's rank never changes"),
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


def test_a_spec_that_promises_graphs_is_held_to_it(tmp_path: Path) -> None:
    spec = f"attention:{broken.__name__}:CAPTURING_SPEC"
    (failure,) = run_suite(tmp_path, spec, "-k", "captured")
    assert "a backend that can be captured has prepare_for_capture" in failure


def test_a_class_without_a_spec_promises_no_graphs(tmp_path: Path) -> None:
    backend = f"attention:{path_of(broken.SaysThatItCaptures)}"
    assert run_suite(tmp_path, backend, "-k", "captured or padded_decode") == []
