"""Every installed attention library on the real GPU against attention in float32.

The kernels round the weights of the sum to the dtype of the values before they multiply, which
adds about as much as the rounding of the output: two hundredths of values below about 4.
Modules of FlashInfer that are not built yet are skipped, since one takes minutes to compile; the
whole product of page sizes, head ratios and dtypes is marked slow, since FlashAttention 4 compiles
some seconds for each ratio and dtype.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minisgl.attention.contract import AttentionBackend
from minisgl.attention.split import SplitAttentionBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.device import compute_capability
from minisgl.plugin.spec import ProbeContext
from tests.fakes.attention_case import AttentionCase, CaseShape, ReplayedDecode, Step, assert_near

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 2e-2
NAMES = ("fi", "fa2", "fa3", "fa4", "cuda")
PAGE_SIZES = (1, 16, 64, 128, 256)
GROUP_SIZES = (1, 2, 3, 5, 7, 8)
DTYPES = (torch.bfloat16, torch.float16)
SHAPE = CaseShape(head_dim=128, device="cuda", page_size=16, max_seq_len=1024)
PREFILL_ROWS = [
    Step(1, 0, 33),
    Step(2, 128, 200),
    Step(3, 0, 1000),
    Step(5, 512, 513),
    Step(0, 0, 1),
]
DECODE_ROWS = [
    Step(3, 999, 1000),
    Step(0, 0, 1),
    Step(4, 16, 17),
    Step(2, 255, 256),
    Step(5, 512, 513),
]


def make_backend(name: str, case: AttentionCase) -> AttentionBackend:
    """Build a backend, or skip where it does not serve the case on this machine."""
    shape, window = case.shape, max(case.shape.windows) >= 0
    context = ProbeContext(
        device="cuda",
        sm=compute_capability(case.device),
        dtype=str(shape.dtype).removeprefix("torch."),
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        has_sliding_window=window,
    )
    if name == "cuda":
        return make_cuda(case, context)
    return make_fi(case, context) if name == "fi" else make_fa(name[2:], case, context)


def make_cuda(case: AttentionCase, context: ProbeContext) -> AttentionBackend:
    plugin = pytest.importorskip("minisgl_kernels_cuda.plugin")
    answer = plugin.probe_attention(context)
    if not answer.ok:
        pytest.skip(f"cuda: {answer.reason}")
    from minisgl_kernels_cuda.attention import build_attention  # noqa: PLC0415

    config = case.config()
    if "prefill" in answer.capabilities.phases:
        return build_attention(config)
    return SplitAttentionBackend(TorchAttentionBackend(config), build_attention(config))


def make_fi(case: AttentionCase, context: ProbeContext) -> AttentionBackend:
    modules = pytest.importorskip("minisgl_attn_flashinfer.modules")
    plugin = pytest.importorskip("minisgl_attn_flashinfer.plugin")
    answer = plugin.probe_attention(context)
    if not answer.ok:
        pytest.skip(f"fi: {answer.reason}")
    found = modules.find_installation()
    for kind, window in itertools.product(
        ("prefill_fa2", "decode"), {False, context.has_sliding_window}
    ):
        name = modules.attention_module(kind, context.dtype, context.head_dim, window)
        if not found.has_module(name):
            pytest.skip(f"fi: {name} is not built")
    # Imported late: FlashInfer initialises CUDA.
    from minisgl_attn_flashinfer.backend import FlashInferBackend  # noqa: PLC0415
    from minisgl_attn_flashinfer.settings import FlashInferSettings  # noqa: PLC0415

    return FlashInferBackend(case.config(FlashInferSettings(prefill_backend="fa2")))


def make_fa(version: str, case: AttentionCase, context: ProbeContext) -> AttentionBackend:
    generations = pytest.importorskip("minisgl_attn_fa.generations")
    choice = generations.choose(context, version)
    if choice.generation is None:
        pytest.skip(f"fa: {choice.reason}")
    if case.shape.page_size % choice.generation.page_multiple:
        pytest.skip(f"fa: page size {case.shape.page_size} is not allowed")
    from minisgl_attn_fa.backend import FlashAttentionBackend  # noqa: PLC0415
    from minisgl_attn_fa.settings import FlashAttentionSettings  # noqa: PLC0415

    return FlashAttentionBackend(
        case.config(FlashAttentionSettings.model_validate({"version": version}))
    )


def capture(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Capture a step in a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return outs

    return replay


def check_eager(backend: AttentionBackend, case: AttentionCase) -> None:
    for rows in (PREFILL_ROWS, DECODE_ROWS):
        batch = case.prefill(rows) if rows is PREFILL_ROWS else case.decode(rows)
        q = case.queries(sum(row.seq_len - row.cached_len for row in rows))
        backend.prepare_metadata(batch)
        for layer_id in range(len(case.shape.windows)):
            out = backend.forward(q, layer_id, batch)
            assert out.is_contiguous()
            assert_near(out, case.expected_of(q, rows, layer_id), TOLERANCE)


def check_graph(backend: AttentionBackend, case: AttentionCase) -> None:
    backend.init_graph(8)
    graphs = {size: ReplayedDecode(backend, case, size, capture) for size in (8, 2)}
    for size, rows in ((8, DECODE_ROWS), (2, DECODE_ROWS[:1]), (8, DECODE_ROWS[1:4])):
        q = case.queries(len(rows))
        for layer_id, out in enumerate(graphs[size].run(rows, q)):
            assert_near(out[: len(rows)], case.expected_of(q, rows, layer_id), TOLERANCE)
            assert out.isfinite().all()


def along_each_axis() -> Iterator[CaseShape]:
    yield from (replace(SHAPE, page_size=size) for size in PAGE_SIZES)
    yield from (replace(SHAPE, page_size=256, num_qo_heads=2 * n) for n in GROUP_SIZES)
    yield from (replace(SHAPE, page_size=256, dtype=dtype) for dtype in DTYPES)


def label(shape: CaseShape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    return f"page{shape.page_size}-{shape.num_qo_heads}over{shape.num_kv_heads}-{dtype}"


@pytest.mark.parametrize("shape", list(dict.fromkeys(along_each_axis())), ids=label)
@pytest.mark.parametrize("name", NAMES)
def test_it_gives_the_reference_result(name: str, shape: CaseShape) -> None:
    case = AttentionCase(shape)
    backend = make_backend(name, case)
    check_eager(backend, case)
    check_graph(backend, case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_combination_gives_the_reference_result(
    name: str, page_size: int, group_size: int, dtype: torch.dtype
) -> None:
    shape = replace(SHAPE, page_size=page_size, num_qo_heads=2 * group_size, dtype=dtype)
    case = AttentionCase(shape)
    backend = make_backend(name, case)
    check_eager(backend, case)
    check_graph(backend, case)


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_has_its_own_window(name: str) -> None:
    case = AttentionCase(replace(SHAPE, page_size=256, windows=(-1, 100)))
    backend = make_backend(name, case)
    check_eager(backend, case)
    check_graph(backend, case)


@pytest.mark.parametrize("name", NAMES)
def test_steps_that_are_submitted_ahead_give_the_reference_results(name: str) -> None:
    case = AttentionCase(replace(SHAPE, page_size=256))
    backend = make_backend(name, case)
    backend.init_graph(8)
    graph = ReplayedDecode(backend, case, 8, capture)
    rows_of = [(PREFILL_ROWS, DECODE_ROWS, DECODE_ROWS)[i % 3][i % 4 :] for i in range(60)]
    # Made beforehand: such copies from ordinary host memory wait for the device.
    batches = [
        (case.prefill if i % 3 == 0 else case.decode)(rows) for i, rows in enumerate(rows_of)
    ]
    queries = [case.queries(sum(r.seq_len - r.cached_len for r in rows)) for rows in rows_of]
    padded = [case.decode(rows, 8) if i % 3 == 1 else None for i, rows in enumerate(rows_of)]
    ballast = torch.zeros(1 << 28, device="cuda")
    outs = []
    for batch, q, graph_batch in zip(batches, queries, padded, strict=True):
        ballast.add_(1)  # half a millisecond of work, so that the host gets ahead
        if graph_batch is not None:
            outs.append(graph.run_batch(graph_batch, q)[0][: len(q)].clone())
            continue
        backend.prepare_metadata(batch)
        outs.append(backend.forward(q, 0, batch))
    torch.cuda.synchronize()
    for out, q, rows in zip(outs, queries, rows_of, strict=True):
        assert_near(out, case.expected_of(q, rows), TOLERANCE)


def test_planning_a_step_reads_nothing_back() -> None:
    case = AttentionCase(SHAPE)
    backend = make_backend("fi", case)
    backend.init_graph(8)
    check_eager(backend, case)  # what is made at the first plan may synchronise
    backend.prepare_for_capture(case.decode([], 8))
    batches = [case.prefill(PREFILL_ROWS), case.decode(DECODE_ROWS), case.decode(DECODE_ROWS, 8)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        for batch in batches[:2]:
            backend.prepare_metadata(batch)
        backend.prepare_for_replay(batches[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "rope", "silu_and_mul"])
def test_a_kernel_of_fi_gives_the_reference_result(name: str) -> None:
    modules = pytest.importorskip("minisgl_attn_flashinfer.modules")
    found = modules.find_installation()
    module = "norm" if "norm" in name else name
    if found is None or not found.has_module(module):
        pytest.skip(f"fi: module {module} of FlashInfer is not built")
    from minisgl.ops.contract import KernelConfig  # noqa: PLC0415
    from minisgl_attn_flashinfer.kernels import FlashInferKernelSet  # noqa: PLC0415

    op = FlashInferKernelSet(KernelConfig(torch.device("cuda"), torch.bfloat16)).ops()[name]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16)

    x, weight, residual = random(33, 1024), random(1024), random(33, 1024)
    if name == "rms_norm":
        outs = [op(x, weight, 1e-6), op(x.view(33, 8, 128)[:, 2:6], weight[:128], 1e-6)]
        wants = [norm(x, weight), norm(x.view(33, 8, 128)[:, 2:6], weight[:128])]
    elif name == "fused_add_rms_norm":
        total = x.float() + residual.float()
        wants = [norm(total, weight), total]
        outs = list(op(x, residual, weight, 1e-6))
    elif name == "rope":
        heads, cache = x.view(33, 8, 128), torch.randn(64, 128, device="cuda")
        positions = torch.arange(33, dtype=torch.int32, device="cuda") + 5
        wants = [turn(heads[:, :4], cache[5:38]), turn(heads[:, 4:6], cache[5:38])]
        outs = list(op(heads[:, :4], heads[:, 4:6], positions, cache))
    else:
        gate, up = x.float().chunk(2, dim=-1)
        wants, outs = [torch.nn.functional.silu(gate) * up], [op(x)]
    for out, want in zip(outs, wants, strict=True):
        assert_near(out, want.cpu(), TOLERANCE)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), 1e-6)


def turn(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
