"""Our attention on the real GPU: what only shows there, between blocks and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.ops.contract import KernelConfig, QKVInputs
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import newest
from minisgl.testing.reference import assert_close
from minisgl_kernels_cuda.attention import CudaAttention, DecodeAttention, build_attention
from minisgl_kernels_cuda.attention_plan import AttentionPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = AttentionShape(
    num_qo_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
    max_seq_len=1024, max_reqs=17,
)  # fmt: skip
LAYOUTS = [(w, b, ends) for w, b in ((4, 1), (4, 3), (8, 1)) for ends in (False, True)]


def make(case: AttentionCase, plan: AttentionPlan | None = None) -> DecodeAttention:
    pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC", exc_type=ImportError)
    both = build_attention(case.config())
    backend = both.decode if isinstance(both, CudaAttention) else both
    assert isinstance(backend, DecodeAttention)
    if plan is not None:
        backend._choose = lambda *_: plan
    return backend


def check(backend: DecodeAttention, case: AttentionCase, batch: Batch) -> None:
    q = case.queries(batch.padded_size)
    for layer_id in range(len(case.shape.windows)):
        out = backend.forward(q, layer_id, batch)
        assert out.isfinite().all()
        expected = case.expected(q, batch, layer_id)
        assert_close(
            out[: batch.size], expected, case.shape.dtype, f"layer {layer_id}", "attention"
        )


def lengths(num_reqs: int, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_reqs)
    lens: list[int] = torch.randint(1, longest + 1, (num_reqs,), generator=generator).tolist()
    return lens


@pytest.mark.parametrize("num_reqs", [1, 3, 17])
@pytest.mark.parametrize("heads", [(16, 8), (40, 8), (32, 4), (7, 1), (16, 1), (8, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shapes_of_real_models_are_near_the_reference(
    head_dim: int, heads: tuple[int, int], num_reqs: int
) -> None:
    case = AttentionCase(
        replace(SHAPE, head_dim=head_dim, num_qo_heads=heads[0], num_kv_heads=heads[1])
    )
    check(make(case), case, case.decode(newest(lengths(num_reqs, 1024))))


@pytest.mark.parametrize("num_reqs", [64, 256])
def test_large_batches_are_near_the_reference(num_reqs: int) -> None:
    case = AttentionCase(replace(SHAPE, max_reqs=num_reqs, max_seq_len=300, num_kv_heads=4))
    check(make(case), case, case.decode(newest(lengths(num_reqs, 300)), num_reqs + 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_types_and_page_sizes_are_near_the_reference(page_size: int, dtype: torch.dtype) -> None:
    case = AttentionCase(replace(SHAPE, dtype=dtype, page_size=page_size, windows=(-1, 77)))
    check(make(case), case, case.decode(newest(lengths(9, 1024))))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_same(layout: tuple[int, int, bool]) -> None:
    case = AttentionCase(SHAPE)
    backend = make(case, AttentionPlan(*layout))
    for num_reqs in (1, 5, 17):
        check(backend, case, case.decode(newest(lengths(num_reqs, 1024))))


@pytest.mark.parametrize("num_reqs", [1, 8, 61])
def test_replays_give_the_same_bits_every_time(num_reqs: int) -> None:
    case = AttentionCase(replace(SHAPE, windows=(-1,) * 4, max_seq_len=512, max_reqs=num_reqs))
    backend = make(case)
    batch, q = case.decode(newest(lengths(num_reqs, 512))), case.queries(num_reqs)
    replay = capture(lambda: [backend.forward(q, layer_id, batch) for layer_id in range(4)])
    first = [out.clone() for out in replay()]
    for layer_id, out in enumerate(first):
        expected = case.expected(q, batch, layer_id)
        assert_close(out, expected, torch.bfloat16, f"layer {layer_id}", "attention")
    for _ in range(200):
        for out, before in zip(replay(), first, strict=True):
            assert torch.equal(out, before)


@pytest.mark.parametrize("num_reqs", [1, 7, 32])
def test_the_newest_key_may_be_stored_by_the_kernel_in_front(num_reqs: int) -> None:
    case = AttentionCase(replace(SHAPE, windows=(-1,) * 6, max_seq_len=512, max_reqs=num_reqs))
    backend = make(case)
    kernels = pytest.importorskip("minisgl_kernels_cuda.backend")
    ops = kernels.CudaKernelSet(KernelConfig(torch.device("cuda", 0), torch.bfloat16)).ops()
    batch = case.decode(newest([1] * num_reqs))
    qkv = torch.randn(6, num_reqs, 32 * 128, device="cuda").to(torch.bfloat16)
    work = qkv.clone()

    def step() -> list[Tensor]:
        work.copy_(qkv)  # no programmatic launch: earlier steps end here
        outs = []
        for layer_id in range(6):
            q = ops["qk_norm_rope_store"](work[layer_id], stage(case, batch, layer_id))
            outs += [q, backend.forward(q, layer_id, batch)]
        return outs

    replay = capture(step)
    for layer_id in range(6):
        note_newest(case, batch, layer_id)
    for seq_lens in ([n + 1 for n in lengths(num_reqs, 400)], [33] * num_reqs, [2] * num_reqs):
        for more in range(3):
            new = case.decode(newest([n + more for n in seq_lens]))
            for name in ("seq_lens", "positions", "out_loc"):
                getattr(batch, name).copy_(getattr(new, name))
            qkv.normal_()
            outs = replay()
            for layer_id in range(6):
                q, out = outs[2 * layer_id : 2 * layer_id + 2]
                note_newest(case, new, layer_id)
                rule = f"layer {layer_id}, {more} after {seq_lens[:4]}"
                expected = case.expected(q, new, layer_id)
                assert_close(out, expected, torch.bfloat16, rule, "attention")


def stage(case: AttentionCase, batch: Batch, layer_id: int) -> QKVInputs:
    """Return what stores keys and values as they are."""
    assert batch.positions is not None
    assert batch.out_loc is not None
    shape = case.shape
    angles = torch.zeros(512, 128, device="cuda")  # made inside of a capture: no copies
    angles[:, :64] = 1.0
    return QKVInputs(
        shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, None, None, 1e-6, batch.positions,
        angles, case.pool.k_slots(layer_id), case.pool.v_slots(layer_id), batch.out_loc,
    )  # fmt: skip


def note_newest(case: AttentionCase, batch: Batch, layer_id: int) -> None:
    """Tell the case what the pool now holds of the newest tokens."""
    assert batch.host is not None
    assert batch.out_loc is not None
    rows = torch.from_numpy(batch.host.table_idx).long()
    at = torch.from_numpy(batch.host.seq_lens).long() - 1
    case._keys[layer_id, rows, at] = case.pool.k_slots(layer_id)[batch.out_loc]
    case._values[layer_id, rows, at] = case.pool.v_slots(layer_id)[batch.out_loc]


def capture(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Capture a step in a CUDA graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = step()

    def replay() -> list[Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return outs

    return replay
