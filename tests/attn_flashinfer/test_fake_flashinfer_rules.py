"""Every argument rule of FlashInfer is refused by the fake, so that the backend's tests mean it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import fake_flashinfer_more as more
from tests.fakes import fake_flashinfer_ops as ops
from tests.fakes.fake_flashinfer_attention import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    fast_decode_plan,
)

PAGE_SIZE = 16
NUM_PAGES = 6
SIZES = (4, 2, 64, PAGE_SIZE)
# Any: the arguments are wrong on purpose.
DTYPES: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def workspace() -> Tensor:
    return torch.zeros(1 << 16, dtype=torch.uint8)


def cache(num_pages: int = NUM_PAGES, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    size = (2, num_pages, PAGE_SIZE, 2, 64)
    k, v = torch.zeros(size, dtype=dtype).unbind(0)
    return k, v


def queries(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(size or (2, 4, 64), dtype=dtype)


def decode_lists(**changed: Tensor) -> dict[str, Any]:
    lists: dict[str, Any] = {
        "indptr": ints(0, 2, 3),
        "indices": ints(4, 0, 5),
        "last_page_len": ints(3, 16),
    }
    return lists | changed


def plan(wrapper: Any, *args: Any, **options: Any) -> None:
    """Plan untyped: the arguments are wrong on purpose."""
    wrapper.plan(*args, **options)


def short(*args: Any, **options: Any) -> None:
    function: Callable[..., None] = fast_decode_plan
    function(*args, **options)


def planned_decode(**lists: Tensor) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan(wrapper, *decode_lists(**lists).values(), *SIZES, **DTYPES)
    return wrapper


def graph_wrapper(num_reqs: int = 2, num_indices: int = 8) -> BatchDecodeWithPagedKVCacheWrapper:
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace(),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(num_reqs + 1, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(num_indices, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros(num_reqs, dtype=torch.int32),
    )


def test_a_right_call_is_served() -> None:
    out = planned_decode().run(queries(), cache())
    assert isinstance(out, Tensor)
    assert out.shape == (2, 4, 64)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"indptr": ints(0, 2, 3).long()}, "indptr must be int32"),
        ({"indices": ints(4, 0, 5).long()}, "indices must be int32"),
        ({"last_page_len": torch.tensor([3.0, 16.0])}, "last_page_len must be int32"),
        ({"indptr": ints(1, 2, 3)}, "must begin with 0"),
        ({"indptr": ints(0, 3, 2)}, "must not decrease"),
        ({"indptr": ints(0, 2, 4)}, "reaches past indices"),
        ({"indptr": ints(0, 2)}, "one entry more"),
        ({"last_page_len": ints(0, 16)}, "must be 1 to 16"),
        ({"last_page_len": ints(3, 17)}, "must be 1 to 16"),
    ],
)
def test_wrong_page_lists_are_refused(lists: dict[str, Tensor], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        planned_decode(**lists)


def test_indices_belong_on_the_device() -> None:
    with pytest.raises(ValueError, match="on the device"):
        planned_decode(indices=torch.empty(3, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize(
    ("q", "kv", "message"),
    [
        (queries(3, 4, 64), cache(), "q has shape"),
        (queries(2, 6, 64), cache(), "q has shape"),
        (queries(2, 4, 32), cache(), "q has shape"),
        (queries(dtype=torch.float16), cache(), "q is torch.float16"),
        (queries(), cache(dtype=torch.float16), "k is torch.float16"),
        (queries(), tuple(c.unflatten(1, (2, 8)).flatten(0, 1) for c in cache()), "pages are"),
        (queries(), (cache()[0], cache()[0].clone().transpose(0, 1)), "strides differ"),
        (queries(2, 64, 4).transpose(1, 2), cache(), "last dimension of q"),
        (queries(), cache(num_pages=5), "outside the pool"),
    ],
)
def test_a_run_that_differs_from_its_plan_is_refused(q: Tensor, kv: Any, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        planned_decode().run(q, kv)


def test_a_run_needs_a_plan() -> None:
    with pytest.raises(AttributeError, match="plan was not called"):
        BatchDecodeWithPagedKVCacheWrapper(workspace()).run(queries(), cache())


def test_the_window_is_the_planned_one() -> None:
    with pytest.raises(AssertionError, match="window_left differs"):
        planned_decode().run(queries(), cache(), window_left=3)


def test_the_output_may_not_be_the_input() -> None:
    q = queries()
    with pytest.raises(ValueError, match="alias"):
        planned_decode().run(q, cache(), out=q)


def test_the_default_dtype_is_not_bfloat16() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan(wrapper, *decode_lists().values(), *SIZES)
    with pytest.raises(ValueError, match=r"planned was torch\.float16"):
        wrapper.run(queries(), cache())


def test_the_workspace_must_be_zero_bytes() -> None:
    with pytest.raises(ValueError, match="zero before"):
        BatchDecodeWithPagedKVCacheWrapper(workspace() + 1)
    with pytest.raises(ValueError, match="uint8"):
        BatchDecodeWithPagedKVCacheWrapper(workspace().view(torch.int32))


def test_a_graph_keeps_its_batch_size() -> None:
    wrapper = graph_wrapper(num_reqs=3)
    with pytest.raises(ValueError, match="batch size should be fixed"):
        plan(wrapper, *decode_lists().values(), *SIZES, **DTYPES)


def test_a_graph_keeps_the_size_of_its_indices() -> None:
    wrapper = graph_wrapper(num_indices=2)
    with pytest.raises(ValueError, match="do not fit"):
        plan(wrapper, *decode_lists().values(), *SIZES, **DTYPES)


def test_a_graph_needs_its_buffers() -> None:
    with pytest.raises(ValueError, match="three buffers"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True)


def test_a_graph_reads_its_own_buffers_and_schedule() -> None:
    wrapper = graph_wrapper()
    plan(wrapper, *decode_lists().values(), *SIZES, **DTYPES)
    assert wrapper._paged_kv_last_page_len_buf is not None
    wrapper._paged_kv_last_page_len_buf[0] = 4
    with pytest.raises(AssertionError, match="plan again"):
        wrapper.run(queries(), cache())


def test_the_short_plan_needs_a_full_one_first() -> None:
    with pytest.raises(AttributeError, match="full plan"):
        short(graph_wrapper(), *decode_lists().values(), *SIZES, **DTYPES)


def test_the_short_plan_leaves_the_buffers_to_the_caller() -> None:
    wrapper = graph_wrapper()
    plan(wrapper, *decode_lists().values(), *SIZES, **DTYPES)
    new = decode_lists(last_page_len=ints(5, 16))
    short(wrapper, *new.values(), *SIZES, **DTYPES)
    with pytest.raises(AssertionError, match="plan again"):
        wrapper.run(queries(), cache())


@pytest.mark.parametrize("num_qo_heads", [10, 12, 14])
def test_cuda_cores_serve_some_ratios_only(num_qo_heads: int) -> None:
    sizes = (num_qo_heads, 2, 64, PAGE_SIZE)
    with pytest.raises(RuntimeError, match="unsupported group_size"):
        plan(BatchDecodeWithPagedKVCacheWrapper(workspace()), *decode_lists().values(), *sizes)


def test_head_dimensions_are_those_that_were_compiled() -> None:
    sizes = (4, 2, 80, PAGE_SIZE)
    with pytest.raises(RuntimeError, match="unsupported head_dim"):
        plan(BatchDecodeWithPagedKVCacheWrapper(workspace()), *decode_lists().values(), *sizes)


def test_a_fixed_split_needs_tensor_cores() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    with pytest.raises(ValueError, match="needs tensor cores"):
        plan(wrapper, *decode_lists().values(), *SIZES, fixed_split_size=2)


def test_several_query_tokens_need_tensor_cores() -> None:
    with pytest.raises(ValueError, match="needs tensor cores"):
        planned_decode().run(queries(), cache(), q_len_per_req=2)


def prefill_plan(wrapper: BatchPrefillWithPagedKVCacheWrapper, qo_indptr: Tensor) -> None:
    lists = decode_lists()
    plan(wrapper, qo_indptr, *lists.values(), *SIZES, causal=True, **DTYPES)


def test_prefill_checks_the_number_of_rows() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    prefill_plan(wrapper, ints(0, 4, 5))
    with pytest.raises(ValueError, match="q has shape"):
        wrapper.run(queries(4, 4, 64), cache())


def test_prefill_in_a_graph_keeps_the_rows_of_its_first_plan() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace(), "NHD", True, ints(0, 0, 0), ints(0, 0, 0), torch.zeros(8).int(), ints(0, 0)
    )
    prefill_plan(wrapper, ints(0, 4, 5))
    with pytest.raises(ValueError, match="exceed the 5 of the first plan"):
        prefill_plan(wrapper, ints(0, 4, 6))


def test_more_new_tokens_than_keys_give_rows_of_zeros() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    lists = decode_lists(indptr=ints(0, 1, 2), last_page_len=ints(1, 2))
    plan(wrapper, ints(0, 3, 4), *lists.values(), *SIZES, causal=True, **DTYPES)
    k, v = cache()
    out = wrapper.run(queries(4, 4, 64), (k, v + 1))
    assert isinstance(out, Tensor)
    assert out[:, 0, 0].tolist() == [0, 0, 1, 1]


def half(*size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rmsnorm(half(2, 2, 2, 8), half(8)), "input dimension"),
        (lambda: ops.rmsnorm(torch.ones(2, 8), torch.ones(8)), "unsupported dtype"),
        (lambda: ops.rmsnorm(half(2, 8), torch.ones(8)), "differ in dtype"),
        (lambda: ops.rmsnorm(half(8, 2).t(), half(8)), "must be contiguous"),
        (lambda: ops.rmsnorm(half(2, 8), half(4)), "weight must be"),
        (lambda: ops.rmsnorm(half(0, 8), half(8)), "invalid configuration"),
        (lambda: ops.fused_add_rmsnorm(half(2, 2, 8), half(2, 2, 8), half(8)), "rows, hidden"),
        (lambda: ops.fused_add_rmsnorm(half(2, 8), half(3, 8), half(8)), "differ in shape"),
        (lambda: ops.silu_and_mul(half(2, 9)), "must be even"),
        (lambda: ops.silu_and_mul(half(2, 8)), "multiple of 16 bytes"),
        (lambda: ops.silu_and_mul(half(0, 16)), "invalid configuration"),
        (lambda: ops.silu_and_mul(torch.ones(2, 16)), "unsupported dtype"),
        (lambda: ops.silu_and_mul(half(2, 16), out=half(2, 16)), "wrong shape"),
        (lambda: rope(cache=half(8, 64)), "should be float32"),
        (lambda: rope(positions=torch.zeros(2)), "int32 or int64"),
        (lambda: rope(head_size=48), "unsupported head_dim"),
        (lambda: rope(cache=torch.ones(8, 24)), "unsupported rotary_dim"),
        (lambda: rope(query=torch.ones(2, 128)), "unsupported dtype"),
        (lambda: rope(query=half(2, 2, 64)), "tokens, heads"),
    ],
)
def test_wrong_arguments_of_ops_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError), match=message):
        call()


def rope(
    positions: Tensor | None = None,
    query: Tensor | None = None,
    head_size: int = 64,
    cache: Tensor | None = None,
) -> None:
    ops.apply_rope_with_cos_sin_cache_inplace(
        ints(0, 1) if positions is None else positions,
        half(2, 128) if query is None else query,
        half(2, 64),
        head_size,
        torch.ones(8, 64) if cache is None else cache,
    )


def test_fused_add_rmsnorm_changes_both_and_returns_nothing() -> None:
    x, residual = half(2, 8), half(2, 8)
    call: Callable[..., Any] = ops.fused_add_rmsnorm
    assert call(x, residual, half(8)) is None
    assert residual.eq(2).all()
    assert x.eq(1).all()


def test_rmsnorm_may_write_over_its_input() -> None:
    x = half(2, 8) * 3
    assert ops.rmsnorm(x, half(8), out=x) is x
    assert x.eq(1).all()


def test_the_activated_half_is_the_first() -> None:
    x = torch.cat((torch.full((1, 16), -30.0), torch.ones(1, 16)), -1).to(torch.bfloat16)
    assert ops.silu_and_mul(x).abs().max() < 1e-6


PROBS = torch.full((2, 4), 0.25)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: more.softmax(PROBS[0]), "two-dimensional"),
        (lambda: more.softmax(PROBS, temperature=torch.ones(3)), "one entry per row"),
        (lambda: more.softmax(PROBS, temperature=True), "must be a number"),
        (lambda: more.top_k_top_p_sampling_from_probs(PROBS, -1, 1.0), "top_k must be above 0"),
        (lambda: more.top_k_top_p_sampling_from_probs(PROBS, torch.ones(2), 1.0), "wrong dtype"),
        (
            lambda: more.top_k_top_p_sampling_from_probs(PROBS, 2, 1.0, seed=1, offset=ints(0)),
            "both tensors or both integers",
        ),
        (
            lambda: more.top_k_top_p_sampling_from_probs(PROBS, 2, 1.0, filter_apply_order="x"),
            "filter_apply_order",
        ),
        (lambda: paged_trtllm(page_size=8), "16, 32 and 64"),
        (lambda: fused_moe(ids=torch.zeros(2, 1, dtype=torch.int64)), "must be int32"),
        (lambda: fused_moe(scales=half(2, 1)), "must be float32"),
        (lambda: fused_moe(quant_scales=()), "must be a list"),
        (lambda: fused_moe(output=torch.zeros(2, 5)), "tokens, hidden"),
    ],
)
def test_wrong_arguments_of_the_rest_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        call()


def paged_trtllm(page_size: int, scale: float = 0.125) -> Tensor:
    k, v = torch.ones(2, 3, page_size, 2, 64).unbind(0)
    return more.trtllm_batch_decode_with_kv_cache(
        torch.ones(1, 4, 64), (k, v), workspace(), ints(1).view(1, 1), ints(5), 16, scale,
        kv_layout="NHD",
    )  # fmt: skip


def fused_moe(
    ids: Tensor | None = None,
    scales: Tensor | None = None,
    quant_scales: Any = None,
    output: Tensor | None = None,
) -> Tensor:
    """One expert whose up projection is 2 and whose gate is 100 (so silu leaves it as it is)."""
    fc1 = torch.tensor([[2.0, 0.0], [100.0, 0.0]]).unsqueeze(0)
    fc2 = torch.ones(1, 2, 1)
    result = torch.zeros(2, 2) if output is None else output
    more.cutlass_fused_moe(
        torch.ones(2, 2),
        torch.zeros(2, 1, dtype=torch.int32) if ids is None else ids,
        torch.ones(2, 1) if scales is None else scales,
        fc1,
        fc2,
        torch.float32,
        [] if quant_scales is None else quant_scales,
        output=result,
    )
    return result


def test_fused_moe_takes_the_up_projection_first_and_fills_the_output() -> None:
    torch.testing.assert_close(fused_moe(), torch.full((2, 2), 200.0))


def test_trtllm_serves_its_page_sizes() -> None:
    torch.testing.assert_close(paged_trtllm(page_size=16), torch.ones(1, 4, 64))


def test_sampling_returns_int32_within_the_top_k() -> None:
    probs = torch.tensor([[0.1, 0.6, 0.3], [0.7, 0.2, 0.1]])
    tokens = more.top_k_top_p_sampling_from_probs(probs, 1, 1.0)
    assert tokens.tolist() == [1, 0]
    assert tokens.dtype == torch.int32
