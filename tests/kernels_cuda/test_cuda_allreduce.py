"""Sums over ranks by our kernels, on simulated devices that share memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl_kernels_cuda.peer_reduce import Limits, PeerReduce
from minisgl_kernels_cuda.units import Loader
from tests.kernels_cuda.peer_ranks import PeerRanks, sum_in_order
from tests.kernels_cuda.reference import BF16, F16, F32, assert_near, make, rms_norm

EPS = 1e-6
WAYS = ("at_once", "by_parts")


@pytest.fixture(scope="session")
def folder(loader: Loader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels are built; without g++ the tests skip with ``loader``."""
    return tmp_path_factory.mktemp("simulated-peers")


def limits_for(way: str) -> Limits:
    return Limits(1 << 30 if way == "at_once" else 0, 1 << 30)


def parts_of(num_ranks: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [make(*shape, dtype=dtype, seed=100 * seed + rank) for rank in range(num_ranks)]


def summed(ranks: PeerRanks, parts: list[Tensor]) -> list[Tensor]:
    def work(kernels: PeerReduce, rank: int) -> Tensor:
        x = parts[rank].clone()
        assert kernels.all_reduce(x)
        return x

    return ranks.run(work)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "shape"),
    [
        (2, BF16, (1, 8)), (2, BF16, (1, 5120)), (2, F16, (3, 1032)), (2, F32, (2, 36)),
        (4, BF16, (5, 1000)), (8, BF16, (2, 520)),
    ],
)  # fmt: skip
def test_every_rank_gets_the_sum_in_order_of_the_ranks(
    folder: Path, way: str, num_ranks: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    ranks = PeerRanks(folder, num_ranks, dtype, limits_for(way))
    parts = parts_of(num_ranks, *shape, dtype=dtype)
    expected = sum_in_order(parts)
    for result in summed(ranks, parts):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_message_larger_than_all_tiles_goes_in_several_turns(folder: Path, way: str) -> None:
    ranks = PeerRanks(folder, 2, BF16, limits_for(way))
    turns = 1 if way == "at_once" else 2
    parts = parts_of(2, turns * 128 * 1024 * 8 + 8 * 77, dtype=BF16)
    expected = sum_in_order(parts)
    for result in summed(ranks, parts):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_exchanges_of_all_kinds_and_sizes_follow_each_other(folder: Path, num_ranks: int) -> None:
    ranks = PeerRanks(folder, num_ranks, BF16, Limits(4096, 1 << 30))
    sizes = (8, 4096, 64, 100_000, 2048, 8, 8000, 16)  # one way up to 2048, the other above
    parts = [parts_of(num_ranks, n, dtype=BF16, seed=i) for i, n in enumerate(sizes)]
    weight = make(512, dtype=BF16)

    def work(kernels: PeerReduce, rank: int) -> list[Tensor]:
        results = []
        for part in parts:
            x = part[rank].clone()
            assert kernels.all_reduce(x)
            results.append(x)
            rows = part[rank][:8].repeat(3, 64)
            done = kernels.all_reduce_add_norm(rows, torch.zeros_like(rows), weight, EPS)
            assert done is not None
            results.append(done[1])
        return results

    for results in ranks.run(work):
        for part, x, total in zip(parts, results[::2], results[1::2], strict=True):
            expected = sum_in_order(part)
            assert torch.equal(x, expected)
            assert torch.equal(total, expected[:8].repeat(3, 64))


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "rows", "n"),
    [
        (2, BF16, 1, 5120), (2, BF16, 3, 64), (2, BF16, 131, 264), (2, F16, 2, 8192),
        (2, F32, 2, 4096), (4, BF16, 2, 1024), (8, BF16, 1, 256),
    ],
)  # fmt: skip
def test_sum_add_and_norm_are_those_of_the_separate_ops(
    folder: Path, num_ranks: int, dtype: torch.dtype, rows: int, n: int
) -> None:
    ranks = PeerRanks(folder, num_ranks, dtype)
    parts = parts_of(num_ranks, rows, n, dtype=dtype)
    residual, weight = make(rows, n, dtype=dtype, seed=90), make(n, dtype=dtype, seed=91)
    expected = sum_in_order(parts) + residual

    def work(kernels: PeerReduce, rank: int) -> tuple[Tensor, Tensor]:
        done = kernels.all_reduce_add_norm(parts[rank].clone(), residual.clone(), weight, EPS)
        assert done is not None
        return done

    results = ranks.run(work)
    for normed, total in results:
        assert torch.equal(total, expected)
        assert torch.equal(normed, results[0][0])
        assert_near(normed, rms_norm(expected, weight, EPS))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3,), BF16), ((1, 4), BF16), ((0, 64), BF16), ((2, 64), F32), ((4096,), BF16)],
)
def test_what_the_kernels_do_not_serve_is_left_alone(
    folder: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    kernels = PeerRanks(folder, 2, BF16, Limits(4096, 4096)).kernels[0]
    x = torch.ones(shape, dtype=dtype)
    assert not kernels.all_reduce(x)
    assert kernels.all_reduce_add_norm(x, x.clone(), x[..., :].flatten(), EPS) is None
    assert torch.equal(x, torch.ones(shape, dtype=dtype))


def test_a_tensor_with_gaps_is_left_alone(folder: Path) -> None:
    kernels = PeerRanks(folder, 2, BF16).kernels[0]
    assert not kernels.all_reduce(torch.ones(4, 64, dtype=BF16)[:, :32])


def test_waiting_for_a_rank_that_does_not_come_ends_with_a_verdict(folder: Path) -> None:
    ranks = PeerRanks(folder, 2, BF16, timeout_s=0.3)
    assert ranks.kernels[1].all_reduce(torch.ones(2000, dtype=BF16))
    assert ranks.verdicts[1].tolist() == [0, 1]
    assert ranks.verdicts[0].tolist() == [0, 0]


def test_the_host_can_end_all_waiting(folder: Path) -> None:
    ranks = PeerRanks(folder, 2, BF16, timeout_s=1e6)
    ranks.verdicts[0][0] = 1
    assert ranks.kernels[0].all_reduce(torch.ones(2000, dtype=BF16))
    assert ranks.verdicts[0].tolist() == [1, 0]
