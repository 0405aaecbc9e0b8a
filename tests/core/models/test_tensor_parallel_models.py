"""Models cut over ranks against the whole model, float32 on a CPU.

The tolerance is 1e-4 on logits of about 5: sums over ranks are in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.errors import ModelError
from minisgl.models.config import normalize_config
from minisgl.testing.thread_ranks import ThreadComm, run_ranks
from tests.core.models.model_harness import Runner, build_model, torch_kernels
from tests.core.models.test_logits_match_hf import random_prompts
from tests.tiny_models import ARCHITECTURES, TinyModel, build_tiny_model, hf_config

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # fields of TinyModel
    **{arch: (arch, {"num_heads": 8, "num_kv_heads": 4}) for arch in ARCHITECTURES},
    "two kv heads": ("llama", {"num_heads": 8, "num_kv_heads": 2}),
    "one kv head": ("qwen3", {"num_heads": 8, "num_kv_heads": 1}),
    "tied head": ("llama", {"is_tied": True}),
    "biases": ("llama", {"extra": {"attention_bias": True, "mlp_bias": True}}),
    "q biases with replicated kv heads": ("qwen2", {"num_heads": 8, "num_kv_heads": 2}),
    "seven to one": ("qwen2", {"num_heads": 28, "num_kv_heads": 4, "hidden_size": 28 * 16}),
    "vocabulary of one more": ("llama", {"vocab_size": 321}),
    "vocabulary of three more": ("mistral", {"vocab_size": 323, "is_tied": True}),
    "window": ("qwen2", {"sliding_window": 5}),
}


def steps_of(runner: Runner, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logits of a prefill and two decode steps, ``[3 * num_reqs, vocab_size]``."""
    reqs = [runner.add(tokens) for tokens in prompts]
    steps = [runner.prefill(reqs)]
    for token in (7, 300):
        steps.append(runner.decode(reqs, [token] * len(reqs)))
    return torch.cat(steps)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_give_the_logits_of_the_whole_model(case: str, num_ranks: int) -> None:
    arch, options = CASES[case]
    hf_model = build_tiny_model(TinyModel(arch, **options))
    config = normalize_config(hf_model.config.to_dict())
    weights = hf_model.state_dict()
    prompts = random_prompts(config.vocab_size, (9, 1, 4))
    expected = steps_of(Runner(config, weights), prompts)

    def work(comm: ThreadComm) -> torch.Tensor:
        return steps_of(Runner(config, weights, comm), prompts)

    for logits in run_ranks(num_ranks, work):
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_layer_reduces_twice_and_the_embedding_once() -> None:
    hf_model = build_tiny_model(TinyModel("qwen3", num_layers=3))
    config = normalize_config(hf_model.config.to_dict())

    def work(comm: ThreadComm) -> int:
        runner = Runner(config, hf_model.state_dict(), comm)
        runner.prefill([runner.add([5, 6, 7])])
        return comm.num_all_reduces

    assert run_ranks(2, work) == [7, 7]


@pytest.mark.parametrize(
    ("options", "num_ranks", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 4}, 3, "--tp 3: must divide .* num_attention_heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "--tp 2: must divide .* num_key_value_heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 4, "--tp 4: must be a multiple of .* is 3"),
        (
            {"num_heads": 20, "num_kv_heads": 5, "extra": {"intermediate_size": 96}},
            5,
            "--tp 5: must divide the model's intermediate_size, which is 96",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(
    options: dict[str, Any], num_ranks: int, message: str
) -> None:
    config = normalize_config(
        hf_config(TinyModel("qwen3", **options)).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    )

    def work(comm: ThreadComm) -> None:
        with pytest.raises(ModelError, match=message):
            build_model(config, comm, torch_kernels())

    run_ranks(num_ranks, work)


def test_each_rank_allocates_only_its_share() -> None:
    config = normalize_config(
        hf_config(TinyModel("qwen3_moe", num_heads=8, num_kv_heads=2, vocab_size=332)).to_dict()
        | {"architectures": ["Qwen3MoeForCausalLM"]}
    )

    def work(comm: ThreadComm) -> int:
        targets = build_model(config, comm, torch_kernels()).load_targets()
        storages = {
            target.dest.untyped_storage().data_ptr(): target.dest.untyped_storage().nbytes()
            for _, target in targets
            if target.dest is not None and target.dest.dim() > 1
        }
        return sum(storages.values())

    whole, quarters = run_ranks(1, work)[0], run_ranks(4, work)
    router = 4 * config.num_layers * 4 * config.hidden_size  # bytes; the whole is on each rank
    kv = 4 * config.num_layers * 2 * 2 * config.head_dim * config.hidden_size
    assert quarters == [(whole - router - kv) // 4 + router + kv // 2] * 4
