from __future__ import annotations

import pytest

from minisgl.plugin.capabilities import admits, missing_capability, shared_page_size
from minisgl.plugin.spec import Capabilities, ProbeContext

ANY = Capabilities()
LISTED = Capabilities(page_sizes=(16, 64, 128))
MULTIPLE = Capabilities(page_multiple=48)


@pytest.mark.parametrize(
    ("backends", "at_least", "expected"),
    [
        ((ANY, ANY), 1, 1),
        ((ANY, ANY), 24, 24),
        ((ANY, LISTED), 1, 16),
        ((LISTED, LISTED), 17, 64),
        ((LISTED, ANY), 500, 128),
        ((ANY, MULTIPLE), 1, 48),
        ((Capabilities(page_multiple=32), MULTIPLE), 1, 96),
        ((LISTED, Capabilities(page_multiple=32)), 1, 64),
        ((LISTED, MULTIPLE), 1, None),
        ((LISTED, Capabilities(page_sizes=(32,))), 1, None),
    ],
)
def test_the_shared_page_size_is_the_smallest_that_will_do(
    backends: tuple[Capabilities, ...], at_least: int, expected: int | None
) -> None:
    found = shared_page_size(backends, at_least)
    assert found == expected
    assert found is None or all(admits(each, found) for each in backends)


@pytest.mark.parametrize(
    ("capabilities", "context", "reason"),
    [
        (ANY, ProbeContext(), ""),
        (Capabilities(phases=("prefill",)), ProbeContext(), "does not serve decode"),
        (
            Capabilities(dtypes=("float16", "bfloat16")),
            ProbeContext(dtype="float32"),
            "wants dtype float16 or bfloat16, not float32",
        ),
        (
            Capabilities(head_dims=(64, 128)),
            ProbeContext(head_dim=80),
            "wants a head dimension of 64 or 128, and the model has 80",
        ),
        (Capabilities(head_dims=(64,)), ProbeContext(head_dim=None), ""),
        (
            MULTIPLE,
            ProbeContext(page_size=16),
            "wants a page size that is a multiple of 48, not 16",
        ),
        (
            Capabilities(has_sliding_window=False),
            ProbeContext(has_sliding_window=True),
            "has no sliding window, which the model needs",
        ),
        (
            Capabilities(has_graph_capture=False),
            ProbeContext(needs_graph_capture=True),
            "cannot be captured in CUDA graphs; ask for it with --cuda-graph-max-bs 0",
        ),
    ],
)
def test_a_missing_capability_is_said_in_words(
    capabilities: Capabilities, context: ProbeContext, reason: str
) -> None:
    assert missing_capability(capabilities, ("prefill", "decode"), context) == reason


def test_graph_capture_matters_to_decode_alone() -> None:
    context = ProbeContext(needs_graph_capture=True)
    assert missing_capability(Capabilities(has_graph_capture=False), ("prefill",), context) == ""
