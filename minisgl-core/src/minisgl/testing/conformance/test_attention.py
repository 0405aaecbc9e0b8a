"""What every attention backend has to do; see `minisgl.attention.contract`.

Results are compared with float64 attention over the same inputs; see `reference.tolerance` for the
width. What the backend's capabilities leave out is skipped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from minisgl.attention.contract import AttentionBackend
from minisgl.core import Batch
from minisgl.errors import MinisglError
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.captured_step import CapturedStep
from minisgl.testing.paged_batches import Step, newest
from minisgl.testing.reference import assert_close
from minisgl.testing.selection import TestedBackend
from minisgl.testing.together import run_together

DTYPES = ("float32", "float16", "bfloat16")
PAGE_SIZES = (1, 2, 16, 64, 128, 256)
HEADS = ((4, 4), (4, 2), (6, 2), (7, 1), (8, 1), (16, 2))

# What no model may have, or one of tomorrow; page sizes that are no powers of two.
UNUSUAL: tuple[dict[str, int], ...] = (
    {"head_dim": 8},
    {"head_dim": 72},
    {"head_dim": 192},
    {"head_dim": 512},
    {"page_size": 3},
    {"page_size": 48},
    {"num_qo_heads": 5, "num_kv_heads": 5},
    {"num_qo_heads": 33, "num_kv_heads": 1},
)

# Whole prompts, one token, chunks behind a cached prefix that ends inside or at the end of a page.
PREFILL = (
    Step(3, 0, 37),
    Step(0, 0, 1),
    Step(5, 64, 97),
    Step(1, 71, 72),
    Step(2, 130, 300),
    Step(4, 255, 257),
)
DECODE = newest((1, 16, 17, 64, 65, 300, 129))

Case = tuple[AttentionBackend, AttentionCase]


def make(backend: TestedBackend, **changes: Any) -> Case:  # Any: fields of different types
    """Build a backend over a filled pool; skip what it says it cannot do."""
    can = backend.capabilities
    shape = AttentionShape(
        page_size=usual_page_size(backend),
        head_dim=(can.head_dims or (64,))[0],
        dtype=usual_dtype(backend),
        device=backend.machine.device,
    )
    shape = replace(shape, **changes)
    dtype = str(shape.dtype).removeprefix("torch.")
    if dtype not in can.dtypes:
        pytest.skip(f"does not take {dtype}")
    if not takes_page_size(backend, shape.page_size):
        pytest.skip(f"does not take pages of {shape.page_size} tokens")
    if can.head_dims is not None and shape.head_dim not in can.head_dims:
        pytest.skip(f"does not take a head dimension of {shape.head_dim}")
    if max(shape.windows) >= 0 and not can.has_sliding_window:
        pytest.skip("has no sliding window")
    reason = backend.refusal(
        dtype=dtype,
        head_dim=shape.head_dim,
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        page_size=shape.page_size,
        has_sliding_window=max(shape.windows) >= 0,
    )
    if reason:
        pytest.skip(reason)
    case = AttentionCase(shape)
    made: AttentionBackend = backend.build(case.config())
    return made, case


def takes_page_size(backend: TestedBackend, page_size: int) -> bool:
    can = backend.capabilities
    return page_size % can.page_multiple == 0 and page_size in (can.page_sizes or [page_size])


def usual_page_size(backend: TestedBackend) -> int:
    sizes = (16, *(backend.capabilities.page_sizes or PAGE_SIZES))
    return next(size for size in sizes if takes_page_size(backend, size))


def usual_dtype(backend: TestedBackend) -> torch.dtype:
    """Take the most precise type, so that the narrow comparison is the usual one."""
    name = next(name for name in DTYPES if name in backend.capabilities.dtypes)
    found: torch.dtype = getattr(torch, name)
    return found


def need_phase(backend: TestedBackend, phase: str) -> None:
    if phase not in backend.capabilities.phases:
        pytest.skip(f"does not serve {phase}")


def check(made: Case, batch: Batch, layer_id: int = 0) -> None:
    """Plan, attend and compare."""
    attention, case = made
    attention.prepare_metadata(batch)
    attend_and_compare(attention, case, batch, layer_id)


def attend_and_compare(
    attention: AttentionBackend, case: AttentionCase, batch: Batch, layer_id: int
) -> None:
    assert batch.positions is not None
    q = case.queries(len(batch.positions))
    before = q.clone()
    out = attention.forward(q, layer_id, batch)
    assert torch.equal(q, before), "forward does not change q"
    compare(out, q, case, batch, layer_id)


def compare(
    out: torch.Tensor, q: torch.Tensor, case: AttentionCase, batch: Batch, layer_id: int = 0
) -> None:
    assert out.shape == q.shape, "forward returns [num_tokens, num_qo_heads, head_dim]"
    assert out.is_contiguous(), "forward returns a contiguous tensor"
    expected = case.expected(q, batch, layer_id)
    rule = (
        f"{batch.phase}: forward gives causal attention over the request's own pages, with the "
        f"scale and window of layer {layer_id}"
    )
    assert_close(out[: len(expected)], expected, case.shape.dtype, rule, "attention")
    assert out.isfinite().all(), "rows of padding hold finite numbers"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefill_with_and_without_a_cached_prefix(backend: TestedBackend, page_size: int) -> None:
    need_phase(backend, "prefill")
    made = make(backend, page_size=page_size)
    check(made, made[1].prefill(PREFILL))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode_of_any_length(backend: TestedBackend, page_size: int) -> None:
    need_phase(backend, "decode")
    made = make(backend, page_size=page_size)
    check(made, made[1].decode(DECODE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}over{heads[1]}")
def test_heads_share_keys_and_values(
    backend: TestedBackend, heads: tuple[int, int], dtype: str
) -> None:
    made = make(backend, num_qo_heads=heads[0], num_kv_heads=heads[1], dtype=getattr(torch, dtype))
    check_phases(backend, made)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dimensions(backend: TestedBackend, head_dim: int) -> None:
    check_phases(backend, make(backend, head_dim=head_dim))


@pytest.mark.parametrize("shape", UNUSUAL, ids=lambda shape: "-".join(map(str, shape.values())))
def test_an_unusual_shape_is_served_or_refused(
    backend: TestedBackend, shape: dict[str, int]
) -> None:
    try:
        made = make(backend, **shape)
    except MinisglError:
        return
    except Exception as error:
        raise AssertionError(
            "what capabilities and probe do not rule out, a backend serves, or its constructor "
            f"refuses it with a MinisglError; it raised {error!r}"
        ) from error
    check_phases(backend, made)


def check_phases(backend: TestedBackend, made: Case) -> None:
    for phase in backend.capabilities.phases:
        batch = made[1].prefill(PREFILL) if phase == "prefill" else made[1].decode(DECODE)
        check(made, batch)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_each_layer_has_its_own_window_scale_and_pool(backend: TestedBackend, phase: str) -> None:
    need_phase(backend, phase)
    made = make(backend, windows=(-1, 0, 5, 63, -1, 200))
    batch = made[1].prefill(PREFILL) if phase == "prefill" else made[1].decode(DECODE)
    made[0].prepare_metadata(batch)
    for layer_id in range(6):
        attend_and_compare(*made, batch, layer_id)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_forward_into_memory_that_is_given(backend: TestedBackend, phase: str) -> None:
    need_phase(backend, phase)
    attention, case = make(backend)
    batch = case.prefill(PREFILL) if phase == "prefill" else case.decode(DECODE)
    attention.prepare_metadata(batch)
    assert batch.positions is not None
    q = case.queries(len(batch.positions))
    rows = torch.full((len(q) + 2, *q.shape[1:]), 7.0, dtype=q.dtype, device=q.device)
    attention.forward_into(rows[1:-1], q, 0, batch)
    compare(rows[1:-1], q, case, batch)
    around = torch.stack([rows[0], rows[-1]])
    assert torch.equal(around, torch.full_like(around, 7.0)), (
        "forward_into writes the rows that it is given and no others"
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 100])
def test_a_prompt_in_chunks_gives_the_same_as_in_one(
    backend: TestedBackend, num_tokens: int
) -> None:
    need_phase(backend, "prefill")
    attention, case = make(backend)
    q = case.queries(130)
    parts = []
    for start in range(0, 130, num_tokens):
        batch = case.prefill([Step(2, start, min(start + num_tokens, 130))])
        attention.prepare_metadata(batch)
        parts.append(attention.forward(q[start : start + num_tokens], 0, batch))
    compare(torch.cat(parts), q, case, case.prefill([Step(2, 0, 130)]))


@pytest.mark.parametrize("padded_size", [7, 8])
def test_a_padded_decode_batch(backend: TestedBackend, padded_size: int) -> None:
    need_phase(backend, "decode")
    made = make(backend)
    check(made, made[1].decode(newest((40, 1, 300)), padded_size))


def test_a_full_batch_of_the_longest_requests(backend: TestedBackend) -> None:
    made = make(backend)
    size, longest = made[1].shape.max_reqs, made[1].shape.max_seq_len
    if "prefill" in backend.capabilities.phases:
        check(made, made[1].prefill([Step(row, 0, longest) for row in range(size)]))
    if "decode" in backend.capabilities.phases:
        check(made, made[1].decode(newest([longest] * size)))


def test_the_host_may_run_ahead_of_the_device(backend: TestedBackend) -> None:
    need_phase(backend, "decode")
    attention, case = make(backend)
    launched = []
    for step in range(8):
        batch = case.decode(newest(17 * step + 1 + i for i in range(1 + step % 4)))
        attention.prepare_metadata(batch)
        q = case.queries(batch.size)
        launched.append((attention.forward(q, 0, batch), q, batch))
    for out, q, batch in launched:
        compare(out, q, case, batch)


def test_a_batch_keeps_its_plan_when_another_one_is_made(backend: TestedBackend) -> None:
    for phase in backend.capabilities.phases:
        attention, case = make(backend, windows=(-1, -1))
        first = case.prefill(PREFILL) if phase == "prefill" else case.decode(DECODE)
        attention.prepare_metadata(first)
        attend_and_compare(attention, case, first, 0)
        attend_and_compare(attention, case, first, 1)


def test_two_backends_share_nothing(backend: TestedBackend) -> None:
    for phase in backend.capabilities.phases:
        steps = (PREFILL, PREFILL[1:]) if phase == "prefill" else (DECODE, DECODE[2:5])
        pairs = [make(backend) for _ in range(2)]
        batches = [
            case.prefill(each) if phase == "prefill" else case.decode(each)
            for (_, case), each in zip(pairs, steps, strict=True)
        ]
        for (attention, _), batch in zip(pairs, batches, strict=True):
            attention.prepare_metadata(batch)
        # Each in a thread of its own, as two engines of one process may be.
        calls = [
            partial(attend_and_compare, *pair, batch, 0)
            for pair, batch in zip(pairs, batches, strict=True)
        ]
        run_together(calls, "two backends of one process share nothing")


def test_a_request_that_got_new_pages_is_read_from_them(backend: TestedBackend) -> None:
    need_phase(backend, "decode")
    attention, case = make(backend)
    check((attention, case), case.decode(newest((100, 200))))
    # Rows 0 and 1 trade places, as when a slot is given to another request.
    case.swap_rows(0, 1)
    check((attention, case), case.decode(newest((200, 100))))


@pytest.mark.parametrize("is_windowed", [False, True])
def test_a_captured_decode_step_can_be_replayed(backend: TestedBackend, is_windowed: bool) -> None:
    need_phase(backend, "decode")
    windows = (-1, 30) if is_windowed else (-1,)
    attention, case = make(backend, windows=windows)
    need_capture(backend, attention)
    layer_id = len(windows) - 1
    attention.init_graph(8)
    graphs = {size: capture(attention, case, size, layer_id) for size in (8, 4, 1)}
    for size, seq_lens in (
        (4, (1, 300, 17)),
        (1, (299,)),
        (8, (1, 16, 17, 64, 65, 300, 129)),
        (4, (16, 17, 18, 19)),
        (8, (320,) * 8),
        (1, (1,)),
        (4, (33, 2)),
    ):
        graph, fixed, q = graphs[size]
        batch = case.decode(newest(seq_lens), size)
        new_q = case.queries(size)
        update(fixed, batch)
        batch.table_idx, batch.seq_lens = fixed.table_idx, fixed.seq_lens
        batch.positions, batch.out_loc = fixed.positions, fixed.out_loc
        q.copy_(new_q)
        attention.prepare_for_replay(batch)
        compare(graph.replay(), new_q, case, batch, layer_id)


def need_capture(backend: TestedBackend, attention: AttentionBackend) -> None:
    """Skip what says that it is not captured; without a spec, what does not override the calls."""
    overrides = type(attention).prepare_for_capture is not AttentionBackend.prepare_for_capture
    can = overrides if backend.is_bare else backend.capabilities.has_graph_capture
    if not can:
        pytest.skip("does not capture graphs")
    assert overrides, (
        "a backend that can be captured has prepare_for_capture; the spec of any other says "
        "Capabilities(has_graph_capture=False)"
    )


def capture(
    attention: AttentionBackend, case: AttentionCase, size: int, layer_id: int
) -> tuple[CapturedStep, Batch, torch.Tensor]:
    """Capture all layers of a step of padding rows; return it with its fixed inputs."""
    fixed = case.decode((), size)
    fixed.reqs, fixed.host = [], None
    q = case.queries(size).clone()
    attention.prepare_for_capture(fixed)

    def step() -> torch.Tensor:
        outputs = [attention.forward(q, layer, fixed) for layer in range(layer_id + 1)]
        return outputs[-1]

    return CapturedStep(step, case.device), fixed, q


def update(fixed: Batch, batch: Batch) -> None:
    """Copy a batch's tensors to the fixed ones."""
    for name in ("table_idx", "seq_lens", "positions", "out_loc"):
        getattr(fixed, name).copy_(getattr(batch, name))
