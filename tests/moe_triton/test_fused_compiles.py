"""Every kernel of `fused` compiles to machine code for Ampere and Hopper, without a GPU.

The interpreter takes much that the compiler refuses; this is what finds it where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minisgl_moe_triton import (
    down_kernels,
    gate_up_kernels,
    route_kernels,
    single_kernels,
)
from minisgl_moe_triton.settings import is_interpreted

pytestmark = pytest.mark.skipif(is_interpreted(), reason="the interpreter is on")

INTS = ("slots", "block_expert", "block_rows", "num_blocks", "experts", "counts")
FLOATS = ("weights", "route_weights")
NUMBERS = ("num_tokens", "num_programs", "max_blocks")
SIZES = {
    "num_experts": 128,
    "top_k": 8,
    "choices": 8,
    "is_renormalized": True,
    "hidden": 256,
    "inner": 128,
    "width": 128,
    "precision": "tf32",
    "group_m": 1,
    "has_halves": False,
    "has_tma": False,
}
ROUTING = [
    (route_kernels.route_and_sort_kernel, {"rows": 16, "block_m": 16}),
    (route_kernels.route_kernel, {"rows": 32}),
    (route_kernels.sort_kernel, {"rows": 32, "block_m": 16, "count_rows": 64}),
    (down_kernels.combine_kernel, {"block_n": 256}),
    (single_kernels.single_gate_up_kernel, {"block_n": 8, "block_k": 256, "stages": 4}),
    (single_kernels.single_down_kernel, {"block_n": 8, "block_k": 64}),
]
THIN = {"block_m": 16, "block_n": 32, "block_k": 128}
WIDE = {"block_m": 128, "block_n": 64, "block_k": 64, "has_halves": True}
PRODUCTS = [
    (gate_up_kernels.gate_up_kernel, THIN),
    (gate_up_kernels.gate_up_kernel, WIDE),
    (down_kernels.down_kernel, THIN),
    (down_kernels.down_kernel, WIDE),
]
IDS = [f"{kernel.__name__}-{i}" for i, (kernel, _) in enumerate(ROUTING + PRODUCTS)]  # type: ignore[attr-defined]  # of the function


def compile_for(sm: int, kernel: Any, values: dict[str, Any]) -> Any:  # Any: Triton has no types
    """Compile with bfloat16 tensors; ``values`` are constants beside `SIZES`."""
    constants = SIZES | values | {"has_overlap": sm >= 90}
    signature, known, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = type_of(name, constants, kernel)
        if name in constants:
            known[(i,)] = constants[name]
        elif signature[name].startswith("*"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=known, attrs=aligned)
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True} | (
        {"launch_pdl": True} if sm >= 90 else {}
    )
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def type_of(name: str, constants: dict[str, Any], kernel: Any) -> str:  # Any: as above
    if name in constants:
        return "constexpr"
    if name in NUMBERS:
        return "i32"
    if name in INTS:
        return "*i32"
    if name in FLOATS:
        return "*fp32"
    described = {"weight": "block_n"}
    if kernel is down_kernels.down_kernel:
        described |= {"h": "block_m", "h_half": "block_m"}
    rows = described.get(name)
    if constants["has_tma"] and rows:
        size = constants[rows] // (2 if name == "h_half" and constants["has_halves"] else 1)
        pair = "2, " if kernel is gate_up_kernels.gate_up_kernel else ""
        return f"tensordesc<bf16[{pair}{size}, {constants['block_k']}]>"
    return "*bf16"


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("kernel", "values"), ROUTING + PRODUCTS, ids=IDS)
def test_a_kernel_compiles(kernel: Any, values: dict[str, Any], sm: int) -> None:  # Any: as above
    assert compile_for(sm, kernel, values).asm["cubin"]


@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize(("kernel", "values"), PRODUCTS, ids=IDS[len(ROUTING) :])
def test_the_products_compile_with_tensor_descriptors(
    kernel: Any,  # Any: as above
    values: dict[str, Any],
    sm: int,
) -> None:
    text = compile_for(sm, kernel, values | {"has_tma": True}).asm["ptx"]
    assert "cp.async.bulk.tensor" in text


def test_the_large_products_use_the_tensor_cores_of_hopper() -> None:
    text = compile_for(90, gate_up_kernels.gate_up_kernel, WIDE).asm["ptx"]
    assert "wgmma.mma_async" in text
