"""Products of batches on a GPU of compute capability 9.0, in every form, against float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl.ops.contract import PackedLinear
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.linear import LinearKernels
from minisgl_kernels_cuda.linear_plans import BatchPlan, has_kernel, kernel_rows
from minisgl_kernels_cuda.linear_table import batch_rule
from minisgl_kernels_cuda.norm import Norms
from tests.kernels_cuda.planned_kernels import LargeKernels, PlannedKernels, product
from tests.kernels_cuda.reference import BF16, F16, TOLERANCE, assert_near

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an NVIDIA GPU of compute capability 9.0",
    ),
]

# In step with each other and not, with and without clusters, all steps at once and few.
PLANS = [
    BatchPlan(1, 1, 2, 2), BatchPlan(1, 1, 6, 3), BatchPlan(1, 2, 4, 2), BatchPlan(1, 4, 2, 2),
    BatchPlan(1, 8, 3, 2), BatchPlan(2, 1, 3, 2), BatchPlan(2, 4, 2, 2), BatchPlan(2, 8, 2, 2),
]  # fmt: skip
MAX_SHARED_BYTES = 207 * 1024


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> DeviceLoader:
    """Kernels on the device, compiled afresh."""
    folder: Path = tmp_path_factory.mktemp("compiled")
    device = torch.device("cuda", 0)
    return DeviceLoader(device, Compiler(device_size(device).arch, folder), True)


@pytest.fixture(scope="module")
def kernels(loader: DeviceLoader) -> Mapping[torch.dtype, PlannedKernels]:
    """Kernels of both types, whose plan is set by each test."""
    return {dtype: PlannedKernels(loader, dtype, PLANS[0]) for dtype in (BF16, F16)}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def gpu(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def poison(*shape: int, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next tensor of this shape gets."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def check(
    kernels: PlannedKernels, plan: BatchPlan, tensors: tuple[Tensor, Tensor, Tensor | None]
) -> None:
    """Multiply by one plan and compare."""
    x, weight, bias = tensors
    kernels.plan = plan
    packed = kernels.pack_linear(weight, bias)
    poison(x.shape[0], weight.shape[0], dtype=x.dtype)
    assert_near(packed(x), product(x, weight, bias), scale=x.shape[1] ** 0.5 / 64)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_form_is_near_float64(
    kernels: Mapping[torch.dtype, PlannedKernels], dtype: torch.dtype, plan: BatchPlan
) -> None:
    for n, k in ((1024, 2048), (1000, 1032), (37, 264)):
        weight, bias = gpu(n, k, dtype=dtype, seed=1) / 8, gpu(n, dtype=dtype, seed=2)
        for rows in (1, 8, 16, 31, 32, 48, 64, 77, 96, 128):
            size = kernel_rows(rows)
            if not has_kernel(plan, rows) or plan.shared_bytes(size) > MAX_SHARED_BYTES:
                continue
            check(kernels[dtype], plan, (gpu(rows, k, dtype=dtype), weight, bias))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_any_number_of_rows_is_near_float64(
    kernels: Mapping[torch.dtype, PlannedKernels], dtype: torch.dtype
) -> None:
    weight, bias = gpu(192, 776, dtype=dtype, seed=1) / 8, gpu(192, dtype=dtype, seed=2)
    for rows in range(1, 131):
        x = gpu(rows, 776, dtype=dtype, seed=rows)
        check(kernels[dtype], BatchPlan(1, 2, 3, 2), (x, weight, bias))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024), (7168, 5120),
        (5120, 5120), (34_816, 5120), (5120, 17_408), (49_152, 576), (960, 576), (8, 8),
    ],
)  # fmt: skip
def test_the_rule_serves_the_weights_of_models(
    kernels: Mapping[torch.dtype, PlannedKernels], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = gpu(*shape, dtype=dtype, seed=1) / 8
    for rows in (16, 40, 64, 128):
        plan = batch_rule(*shape, rows, device_size(0))
        check(kernels[dtype], plan, (gpu(rows, shape[1], dtype=dtype), weight, None))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[3], PLANS[5], PLANS[6]], ids=str)
def test_a_gated_product_is_the_activation_of_the_product(
    kernels: Mapping[torch.dtype, PlannedKernels], loader: DeviceLoader, plan: BatchPlan,
    activation: str,
) -> None:  # fmt: skip
    kernels[BF16].plan = plan
    act_and_mul = build_activations(loader, BF16)[f"{activation}_and_mul"]
    for n, k in ((6144, 1024), (200, 264)):
        weight, bias = gpu(n, k, seed=1) / k**0.5, gpu(n, seed=2)
        gated = kernels[BF16].pack_gated_linear(weight, bias, activation)  # type: ignore[arg-type]  # one of the names
        plain = kernels[BF16].pack_linear(weight, bias)
        for rows in (1, 16, 50, 64, 128):
            if not has_kernel(plan, rows):
                continue
            x = gpu(rows, k, seed=rows)
            poison(rows, n // 2, dtype=BF16)
            assert torch.equal(gated(x), act_and_mul(plain(x)))


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_gated_product_of_few_rows_is_the_activation_of_the_product(
    loader: DeviceLoader, rows: int
) -> None:
    activations = build_activations(loader, BF16)
    # A device without the kernels of batches.
    device = replace(device_size(0), arch="sm_90")
    few = LinearKernels(loader, BF16, device, 16, activations)
    for n, k in ((6144, 1024), (200, 264), (2000, 3072)):
        weight, x = gpu(n, k, seed=1) / k**0.5, gpu(rows, k)
        expected = activations["silu_and_mul"](few.pack_linear(weight, None)(x))
        assert torch.equal(few.pack_gated_linear(weight, None, "silu")(x), expected)


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_a_chain_gives_the_same_bits_at_every_replay(
    kernels: Mapping[torch.dtype, PlannedKernels], loader: DeviceLoader, rows: int
) -> None:
    # Kernels overlap in a replayed graph, where one that does not wait as it should would differ.
    products = []
    plans = [p for p in PLANS[1:] if has_kernel(p, rows)]
    for i, plan in enumerate(plans):
        kernels[BF16].plan = plan
        up = kernels[BF16].pack_gated_linear(gpu(4096, 1024, seed=2 * i) / 32, None, "silu")
        down = kernels[BF16].pack_linear(gpu(1024, 2048, seed=2 * i + 1) / 32, None)
        products.append((up, down))

    compare_replays(loader, products, rows)


@pytest.fixture(scope="module")
def many(loader: DeviceLoader) -> Mapping[torch.dtype, LargeKernels]:
    """Kernels of many rows of both types, for any number of rows."""
    return {dtype: LargeKernels(loader, dtype, device_size(0)) for dtype in (BF16, F16)}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        # As 14B has them, and sizes that end within a tile, a step or a cluster's rows.
        (8192, 7168, 5120), (4096, 5120, 5120), (2048, 34_816, 5120), (3000, 5120, 17_408),
        (8192, 4096, 4096), (2049, 1000, 1032), (4226, 4104, 776), (2304, 264, 2056),
        (1, 8, 8), (100, 520, 72), (129, 256, 64), (700, 151_936, 1024),
    ],
)  # fmt: skip
def test_many_rows_are_near_float64(
    many: Mapping[torch.dtype, LargeKernels], dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    x, weight = gpu(rows, k, dtype=dtype), gpu(n, k, dtype=dtype, seed=1) / 8
    for bias in (None, gpu(n, dtype=dtype, seed=2)):
        packed = many[dtype].pack_linear(weight, bias)
        poison(rows, n, dtype=dtype)
        out = packed(x)
        assert_near(out, product(x, weight, bias), scale=k**0.5 / 64)
        for _ in range(3):
            assert torch.equal(packed(x), out)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(8192, 34_816, 5120), (2048, 6144, 1024), (2500, 2000, 264), (1, 16, 8), (300, 272, 520)],
)
def test_a_gated_product_of_many_rows_is_the_activation_of_the_product(
    many: Mapping[torch.dtype, LargeKernels], loader: DeviceLoader, activation: str,
    rows: int, n: int, k: int,
) -> None:  # fmt: skip
    for dtype, kernels in many.items():
        act_and_mul = build_activations(loader, dtype)[f"{activation}_and_mul"]
        x, weight = gpu(rows, k, dtype=dtype), gpu(n, k, dtype=dtype, seed=1) / k**0.5
        bias = gpu(n, dtype=dtype, seed=2)
        gated = kernels.pack_gated_linear(weight, bias, activation)  # type: ignore[arg-type]  # one of the names
        expected = act_and_mul(kernels.pack_linear(weight, bias)(x))
        poison(rows, n // 2, dtype=dtype)
        assert torch.equal(gated(x), expected)


@pytest.mark.parametrize("rows", [200, 2048, 2900])
def test_a_chain_of_many_rows_gives_the_same_bits_at_every_replay(
    many: Mapping[torch.dtype, LargeKernels], loader: DeviceLoader, rows: int
) -> None:
    products = [
        (
            many[BF16].pack_gated_linear(gpu(4096, 1024, seed=2 * i) / 32, None, "silu"),
            many[BF16].pack_linear(gpu(1024, 2048, seed=2 * i + 1) / 32, None),
        )
        for i in range(3)
    ]

    compare_replays(loader, products, rows)


@pytest.fixture(scope="module")
def wide(loader: DeviceLoader) -> Mapping[torch.dtype, LargeKernels]:
    """Kernels of wide weights of both types."""
    device = device_size(0)
    return {dtype: LargeKernels(loader, dtype, device, is_wide=True) for dtype in (BF16, F16)}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        # 14B on one GPU and on two, 32B; and sizes that end within a tile, a step or a warpgroup.
        (129, 34_816, 5120), (192, 34_816, 5120), (160, 17_408, 5120), (136, 51_200, 5120),
        (1, 16, 8), (100, 528, 72), (150, 2000, 264), (190, 6144, 1032),
    ],
)  # fmt: skip
def test_wide_products_are_the_activation_of_the_sums(
    wide: Mapping[torch.dtype, LargeKernels], loader: DeviceLoader, dtype: torch.dtype,
    rows: int, n: int, k: int,
) -> None:  # fmt: skip
    silu_and_mul = build_activations(loader, dtype)["silu_and_mul"]
    x, weight = gpu(rows, k, dtype=dtype), gpu(n, k, dtype=dtype, seed=1) / k**0.5
    for bias in (None, gpu(n, dtype=dtype, seed=2)):
        packed = wide[dtype].pack_gated_linear(weight, bias, "silu")
        poison(rows, n // 2, dtype=dtype)
        out = packed(x)
        expected = silu_and_mul(product(x, weight, bias).to(dtype))
        # Gate, activation and product are each rounded, and any of them may fall the other way.
        apart = (out.double() - expected.double()).abs()
        assert (apart <= 3 * TOLERANCE[dtype] * (1 + expected.double().abs())).all()
        for _ in range(3):
            assert torch.equal(packed(x), out)


@pytest.mark.parametrize("rows", [130, 192])
def test_a_chain_of_wide_products_gives_the_same_bits_at_every_replay(
    wide: Mapping[torch.dtype, LargeKernels], many: Mapping[torch.dtype, LargeKernels],
    loader: DeviceLoader, rows: int,
) -> None:  # fmt: skip
    products = [
        (
            wide[BF16].pack_gated_linear(gpu(40_960, 1024, seed=2 * i) / 32, None, "silu"),
            many[BF16].pack_linear(gpu(1024, 20_480, seed=2 * i + 1) / 128, None),
        )
        for i in range(3)
    ]

    compare_replays(loader, products, rows)


def compare_replays(
    loader: DeviceLoader, products: Sequence[tuple[PackedLinear, PackedLinear]], rows: int
) -> None:
    """Capture a chain of products and norms; compare replays on new inputs with single calls."""
    fused_add_rms_norm, scale = Norms(loader, BF16).fused_add_rms_norm, gpu(1024, seed=9)

    def step(x: Tensor, residual: Tensor) -> Tensor:
        for up, down in products:
            x, residual = fused_add_rms_norm(down(up(x)), residual, scale, 1e-6)
        return x

    x, residual = gpu(rows, 1024), torch.zeros(rows, 1024, dtype=BF16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x, residual)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(x, residual.zero_())
        for seed in range(20):
            new = gpu(rows, 1024, seed=seed)
            x.copy_(new)
            graph.replay()
            alone = step(new, torch.zeros_like(residual))
            stream.synchronize()
            assert torch.equal(captured, alone)
