"""Norm, rotation and KV store in one, on the simulator."""

from __future__ import annotations

import pytest
import torch

from minisgl.ops.contract import QKVInputs
from minisgl_kernels_cuda.qkv import QKVStage
from minisgl_kernels_cuda.units import Loader
from tests.kernels_cuda.reference import (
    BF16,
    F16,
    F32,
    assert_near,
    cos_sin_cache,
    make,
    rms_norm,
    rope,
)  # fmt: skip

CASES = [
    (BF16, (4, 2), 128, 128, True),
    (BF16, (3, 1), 64, 64, False),
    (F32, (2, 2), 256, 256, True),
    (F16, (2, 1), 128, 128, True),
    (BF16, (2, 1), 128, 64, True),
    (F32, (1, 1), 80, 80, False),
    (BF16, (2, 1), 48, 6, True),
    (F32, (2, 1), 64, 64, True),
    (BF16, (1, 1), 256, 256, True),
    (BF16, (14, 2), 64, 64, False),
    (F16, (7, 1), 128, 128, True),  # tokens share warps
]


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "rotary_dim", "has_norm"),
    CASES,
)  # fmt: skip
def test_qkv_stage_is_near_its_parts_in_float64(
    loader: Loader, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, rotary_dim: int,
    has_norm: bool,
) -> None:  # fmt: skip
    num_qo, num_kv = heads
    num_tokens = 5
    qkv = make(num_tokens, (num_qo + 2 * num_kv) * head_dim, dtype=dtype)
    k_pool, v_pool = torch.full((2, 11, num_kv, head_dim), 7.0, dtype=dtype)
    inputs = QKVInputs(
        num_qo, num_kv, head_dim,
        make(head_dim, dtype=dtype, seed=1) if has_norm else None,
        make(head_dim, dtype=dtype, seed=2) if has_norm else None,
        1e-6, torch.tensor([0, 9, 3, 1, 9], dtype=torch.int32), cos_sin_cache(10, rotary_dim),
        k_pool, v_pool, torch.tensor([4, 10, 0, 3, 8]),
    )  # fmt: skip
    q, k, v = qkv.view(num_tokens, -1, head_dim).clone().split((num_qo, num_kv, num_kv), dim=1)
    if inputs.q_norm is not None and inputs.k_norm is not None:
        q, k = rms_norm(q, inputs.q_norm, 1e-6), rms_norm(k, inputs.k_norm, 1e-6)
    out = QKVStage(loader, dtype).qk_norm_rope_store(qkv, inputs)
    # A rotation adds two terms of up to a few units that can cancel.
    assert_near(out, rope(q, inputs.positions, inputs.cos_sin_cache), scale=4)
    expected_k = rope(k, inputs.positions, inputs.cos_sin_cache)
    assert_near(k_pool[inputs.out_loc], expected_k, scale=4)
    assert torch.equal(v_pool[inputs.out_loc], v)
    assert int((k_pool != 7).any(-1).any(-1).sum()) == num_tokens, "another slot was written"
