"""Layers cut over ranks against torch, float32; 1e-5 for sums in another order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.distributed.contract import AllReduceAddNorm
from minisgl.layers.base import BaseOP
from minisgl.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl.layers.linear import GateUpLinear, QKVLinear, RowLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.shard import split_evenly, split_heads
from minisgl.models.config import normalize_config
from minisgl.models.contract import ModelBuild
from minisgl.testing.thread_ranks import ThreadComm, run_ranks
from tests.core.models.model_harness import copy_part, torch_kernels

CPU = torch.device("cpu")
HIDDEN, WIDTH, HEAD_DIM, NUM_Q, NUM_KV = 24, 32, 8, 8, 2
NUM_RANKS = [1, 2, 4]


def make_build(comm: ThreadComm, vocab_size: int = 151) -> ModelBuild:
    config = normalize_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": NUM_Q,
            "num_key_value_heads": NUM_KV,
            "head_dim": HEAD_DIM,
            "attention_bias": True,
        }
    )
    return ModelBuild(config, torch.float32, CPU, torch_kernels(), comm)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(op: BaseOP, weights: dict[str, torch.Tensor]) -> None:
    """Load an op that stands at ``block.op`` of a model, and make it ready."""
    targets = dict(op.load_targets("block.op"))
    assert targets.keys() == weights.keys()
    for name, target in targets.items():
        copy_part(target, weights[name])
    op.finalize()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_row_parallel_bias_is_added_once(num_ranks: int) -> None:
    weight, bias, x = random(HIDDEN, WIDTH), random(HIDDEN, seed=1), random(3, WIDTH, seed=2)

    def work(comm: ThreadComm) -> torch.Tensor:
        shard = split_evenly("width", WIDTH, comm.rank, comm.size)
        op = RowLinear(make_build(comm), WIDTH, shard, has_bias=True)
        fill(op, {"block.op.weight": weight, "block.op.bias": bias})
        return op.forward(x[:, shard.index])

    for result in run_ranks(num_ranks, work):
        torch.testing.assert_close(result, F.linear(x, weight, bias), rtol=0, atol=1e-5)


class FusingComm(ThreadComm):
    """Has the fused op, for two rows at most, and counts its calls."""

    def __init__(self, comm: ThreadComm) -> None:
        self.__dict__ = comm.__dict__  # the same place in the group
        self.num_fused = 0

    @property
    def all_reduce_add_norm(self) -> AllReduceAddNorm:
        return self._fused

    def _fused(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if x.shape[0] > 2:
            return None
        self.num_fused += 1
        total = self.all_reduce(x) + residual
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total


@pytest.mark.parametrize("is_fusing", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_parts_are_summed_added_and_normed(num_ranks: int, num_rows: int, is_fusing: bool) -> None:
    parts = [random(num_rows, HIDDEN, seed=rank) for rank in range(num_ranks)]
    residual, weight = random(num_rows, HIDDEN, seed=90), random(HIDDEN, seed=91)
    total = torch.stack(parts).sum(dim=0) + residual

    def work(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor, int]:
        comm = FusingComm(comm) if is_fusing else comm
        op = RMSNorm(make_build(comm), HIDDEN)
        fill(op, {"block.op.weight": weight})
        normed, added = op.forward_sum_add(parts[comm.rank].clone(), residual.clone())
        return normed, added, getattr(comm, "num_fused", 0)

    expected = F.rms_norm(total, (HIDDEN,), weight, 1e-6)
    for normed, added, num_fused in run_ranks(num_ranks, work):
        torch.testing.assert_close(added, total, rtol=0, atol=1e-5)
        torch.testing.assert_close(normed, expected, rtol=0, atol=1e-5)
        assert num_fused == (is_fusing and num_ranks > 1 and num_rows <= 2)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_part_of_a_row_parallel_product_is_not_summed(num_ranks: int) -> None:
    weight, x = random(HIDDEN, WIDTH), random(3, WIDTH, seed=2)

    def work(comm: ThreadComm) -> tuple[torch.Tensor, int]:
        shard = split_evenly("width", WIDTH, comm.rank, comm.size)
        op = RowLinear(make_build(comm), WIDTH, shard, has_bias=False)
        fill(op, {"block.op.weight": weight})
        return op.forward_part(x[:, shard.index]), comm.num_all_reduces

    results = run_ranks(num_ranks, work)
    assert [count for _, count in results] == [0] * num_ranks
    total = torch.stack([part for part, _ in results]).sum(dim=0)
    torch.testing.assert_close(total, F.linear(x, weight), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_gate_and_up_are_cut_apart(num_ranks: int) -> None:
    gate, up, x = random(WIDTH, HIDDEN), random(WIDTH, HIDDEN, seed=1), random(3, HIDDEN, seed=2)

    def work(comm: ThreadComm) -> torch.Tensor:
        op = GateUpLinear(make_build(comm), WIDTH, has_bias=False)
        fill(op, {"block.gate_proj.weight": gate, "block.up_proj.weight": up})
        return op.forward(x)

    result = torch.cat(run_ranks(num_ranks, work), dim=-1)
    expected = F.silu(F.linear(x, gate)) * F.linear(x, up)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_each_rank_projects_its_query_heads_and_their_kv_heads(num_ranks: int) -> None:
    sizes = {"q": NUM_Q, "k": NUM_KV, "v": NUM_KV}
    weights = {n: random(h * HEAD_DIM, HIDDEN, seed=h) for n, h in sizes.items()}
    biases = {n: random(h * HEAD_DIM, seed=h) for n, h in sizes.items()}
    x = random(3, HIDDEN, seed=7)
    whole = {n: F.linear(x, weights[n], biases[n]).view(3, -1, HEAD_DIM) for n in sizes}

    def work(comm: ThreadComm) -> torch.Tensor:
        op = QKVLinear(make_build(comm), split_heads(NUM_Q, NUM_KV, comm.rank, comm.size))
        named = {f"block.{n}_proj.weight": w for n, w in weights.items()}
        fill(op, named | {f"block.{n}_proj.bias": b for n, b in biases.items()})
        return op.forward(x).view(3, -1, HEAD_DIM)

    for rank, heads in enumerate(run_ranks(num_ranks, work)):
        q, kv = NUM_Q // num_ranks, max(1, NUM_KV // num_ranks)
        first_kv = rank * NUM_KV // num_ranks
        expected = [whole["q"][:, rank * q : (rank + 1) * q]]
        expected += [whole[n][:, first_kv : first_kv + kv] for n in ("k", "v")]
        torch.testing.assert_close(heads, torch.cat(expected, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [151, 152, 5])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_any_vocabulary_is_looked_up_whole(vocab_size: int, num_ranks: int) -> None:
    table = random(vocab_size, HIDDEN)
    ids = torch.arange(vocab_size, dtype=torch.int32).flip(0)

    def work(comm: ThreadComm) -> torch.Tensor:
        op = VocabParallelEmbedding(make_build(comm, vocab_size))
        fill(op, {"block.op.weight": table})
        return op.forward(ids)

    for result in run_ranks(num_ranks, work):
        assert torch.equal(result, table.flip(0))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_logits_of_any_number_of_rows_are_gathered_in_order(num_rows: int, num_ranks: int) -> None:
    weight, x = random(151, HIDDEN), random(num_rows, HIDDEN, seed=1)

    def work(comm: ThreadComm) -> torch.Tensor:
        op = LMHead(make_build(comm), None)
        fill(op, {"block.op.weight": weight})
        return op.forward(x)

    for logits in run_ranks(num_ranks, work):
        torch.testing.assert_close(logits, F.linear(x, weight), rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_padding_never_wins_when_every_logit_is_negative(is_tied: bool) -> None:
    x = torch.ones(2, HIDDEN)
    weight = -random(5, HIDDEN).abs()  # padding rows would give 0, the largest

    def work(comm: ThreadComm) -> list[int]:
        build = make_build(comm, vocab_size=5)
        embedding = VocabParallelEmbedding(build)
        fill(embedding, {"block.op.weight": weight})
        op = LMHead(build, embedding if is_tied else None)
        fill(op, {"block.op.weight": weight})
        return op.forward(x).argmax(dim=-1).tolist()

    expected = F.linear(x, weight).argmax(dim=-1).tolist()
    assert run_ranks(4, work) == [expected] * 4


def test_padding_rows_start_as_zeros() -> None:
    def work(comm: ThreadComm) -> float:
        op = VocabParallelEmbedding(make_build(comm, vocab_size=5))
        return float(op.weight[max(0, 5 - 2 * comm.rank) :].abs().sum())

    assert run_ranks(4, work) == [0.0] * 4
