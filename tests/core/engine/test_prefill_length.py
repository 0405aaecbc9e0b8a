"""How many prompt tokens a step takes where ``--max-prefill-length`` is auto."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minisgl.config.sections import EngineSettings, SchedulerSettings
from minisgl.distributed.single import SingleCommunicator
from minisgl.engine.memory import MemoryBudget, count_pages
from minisgl.engine.prefill_graph import launch_bound_tokens
from minisgl.engine.prefill_length import (
    added_activation_bytes,
    auto_prefill_length,
    resolve_prefill_length,
)
from minisgl.kvcache.pool import PoolShape
from minisgl.models.config import ModelConfig, normalize_config
from minisgl.scheduler.build import scheduler_config
from minisgl.testing.fake_engine import make_limits
from minisgl.testing.source_case import write_tiny_model
from tests.core.engine.engine_harness import make_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return normalize_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        }
    )


QWEN3_0_6B = qwen3(1024, 3072, 28, 16, 8)
QWEN3_1_7B = qwen3(2048, 6144, 28, 16, 8)
QWEN3_4B = qwen3(2560, 9728, 36, 32, 8)
QWEN3_14B = qwen3(5120, 17408, 40, 40, 8)
QWEN3_30B_A3B = normalize_config(
    {
        **QWEN3_0_6B.raw,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
)


class SmallerElsewhere(SingleCommunicator):
    """One of two ranks; the other one has a GPU that takes 10,240 tokens."""

    size = 2

    def min_int(self, value: int) -> int:
        return min(value, 10240)


def give_gpus(monkeypatch: pytest.MonkeyPatch, num_multiprocessors: int) -> None:
    """Let every CUDA device have so many multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=num_multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("config", "tp_size", "expected"),
    [
        pytest.param(QWEN3_0_6B, 1, 16896, id="0.6B"),
        pytest.param(QWEN3_1_7B, 1, 16896, id="1.7B: 0.07 s"),
        pytest.param(QWEN3_4B, 1, 8192, id="4B: 0.19 s"),
        pytest.param(QWEN3_4B, 2, 16896, id="4B on two"),
        pytest.param(QWEN3_14B, 1, 8192, id="14B: 0.7 s"),
        pytest.param(QWEN3_14B, 4, 8192, id="14B on four"),
        pytest.param(QWEN3_14B, 8, 16896, id="14B on eight"),
        pytest.param(QWEN3_30B_A3B, 1, 8192, id="30B-A3B: 0.14 s"),
        pytest.param(QWEN3_30B_A3B, 2, 16896, id="30B-A3B on two: active experts count"),
    ],
)
def test_a_gpu_takes_128_tokens_a_multiprocessor_while_a_step_stays_short(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, tp_size: int, expected: int
) -> None:
    give_gpus(monkeypatch, 132)
    assert auto_prefill_length(config, CUDA, tp_size) == expected


def test_a_small_gpu_and_a_cpu_take_8192(monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto_prefill_length(QWEN3_0_6B, CPU, 1) == 8192
    give_gpus(monkeypatch, 40)
    assert auto_prefill_length(QWEN3_0_6B, CUDA, 1) == 8192


def test_ranks_with_different_gpus_take_what_the_smallest_one_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_gpus(monkeypatch, 132)
    assert resolve_prefill_length(None, QWEN3_0_6B, CUDA, SingleCommunicator()) == 16896
    assert resolve_prefill_length(None, QWEN3_0_6B, CUDA, SmallerElsewhere()) == 10240
    assert resolve_prefill_length(20000, QWEN3_0_6B, CUDA, SmallerElsewhere()) == 20000


def test_captured_prefills_count_the_same_way() -> None:
    # 0.4 ms of 650 TFLOP/s, at 2 * 1024 * (2 * 24 * 128 + 3 * 3072) FLOP a token.
    assert launch_bound_tokens(QWEN3_0_6B, 1) == 8256
    assert launch_bound_tokens(QWEN3_0_6B, 2) == 16512


def test_longer_steps_take_their_memory_from_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert added_activation_bytes(QWEN3_0_6B, 1, torch.bfloat16, 8192) == 0
    assert added_activation_bytes(QWEN3_0_6B, 1, torch.bfloat16, 16) == 0
    added = added_activation_bytes(QWEN3_0_6B, 1, torch.bfloat16, 16896)
    assert added == 8704 * (3 * 1024 + 2 * 24 * 128 + 3 * 3072) * 2
    shape = PoolShape(28, 0, 16, 8, 128)
    settings = EngineSettings(memory_ratio=0.5)
    monkeypatch.setattr("minisgl.engine.memory.free_memory_bytes", lambda device: 20 * 2**30)
    plain, less = (
        count_pages(MemoryBudget(CUDA, 24 * 2**30, n), settings, shape, torch.bfloat16, 40960)
        for n in (0, added)
    )
    page_bytes = shape.page_bytes(torch.bfloat16)
    assert plain == 8 * 2**30 // page_bytes - 1
    assert less == (8 * 2**30 - added) // page_bytes - 1


@pytest.mark.parametrize(("given", "expected"), [(None, 8192), (24, 24), (10**6, 10**6)])
def test_the_engine_settles_it_and_the_scheduler_takes_it(
    tmp_path: Path, given: int | None, expected: int
) -> None:
    limits = make_engine(write_tiny_model(tmp_path / "tiny"), max_prefill_length=given).limits
    assert limits.max_prefill_length == expected
    config = scheduler_config(SchedulerSettings(max_prefill_length=given), limits, tp_size=1)
    assert config.max_prefill_length == expected


def test_a_fake_engine_has_what_it_is_told() -> None:
    assert make_limits().max_prefill_length == 8192
    assert make_limits(max_prefill_length=7).max_prefill_length == 7
