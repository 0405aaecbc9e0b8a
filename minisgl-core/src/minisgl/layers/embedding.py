"""The vocabulary, cut over ranks: embedding at the bottom, head at the top.

Each rank keeps ``ceil(vocab_size / num_ranks)`` rows. Rows past the vocabulary are zeros; logits
are cut to ``vocab_size`` after they are gathered, so that padding can never be sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from minisgl.layers.base import BaseOP, LoadTarget
from minisgl.layers.shard import split_padded

if TYPE_CHECKING:
    from minisgl.models.contract import ModelBuild
    from minisgl.ops.contract import PackedLinear


class VocabParallelEmbedding(BaseOP):
    """Token ids to vectors."""

    def __init__(self, build: ModelBuild) -> None:
        """Allocate this rank's rows, padding zeroed."""
        config = build.config
        self.weight = _allocate_rows(build)
        self._shard = split_padded(config.vocab_size, build.comm.rank, build.comm.size)
        self._vocab_size = config.vocab_size
        self._embedding = build.kernels.embedding
        self._num_ranks = build.comm.size
        self._all_reduce = build.comm.all_reduce

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield ``weight``."""
        yield "weight", _vocab_target(self.weight, self._vocab_size, self._shard.index)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ``ids[num_tokens]``; returns ``[num_tokens, hidden_size]``."""
        y = self._embedding(ids, self.weight, self._shard.start)
        # Ids of other ranks gave rows of zeros, so the sum is the look-up.
        return self._all_reduce(y) if self._num_ranks > 1 else y


class LMHead(BaseOP):
    """Vectors to logits."""

    _packed: PackedLinear

    def __init__(self, build: ModelBuild, embedding: VocabParallelEmbedding | None) -> None:
        """Allocate a weight, or share that of ``embedding`` (tied head)."""
        config = build.config
        self._is_tied = embedding is not None
        self.weight: torch.Tensor | None = (
            _allocate_rows(build) if embedding is None else embedding.weight
        )
        self._shard = split_padded(config.vocab_size, build.comm.rank, build.comm.size)
        self._vocab_size = config.vocab_size
        self._num_ranks = build.comm.size
        self._all_gather = build.comm.all_gather
        self._pack_linear = build.kernels.pack_linear

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield ``weight``; a tied head skips one that the checkpoint has all the same."""
        if self._is_tied:
            yield "weight", LoadTarget(None, is_optional=True)
        else:
            assert self.weight is not None, "weights are loaded before finalize"
            yield "weight", _vocab_target(self.weight, self._vocab_size, self._shard.index)

    def finalize(self) -> None:
        """Pack the weight; the embedding keeps its own reference to a shared one."""
        assert self.weight is not None, "finalize is called once"
        self._packed = self._pack_linear(self.weight, None)
        if not self._packed.is_original_needed:
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, vocab_size]`` logits of ``x[num_rows, hidden_size]``."""
        logits = self._packed(x)
        if self._num_ranks == 1:
            return logits
        return self._all_gather(logits)[:, : self._vocab_size]


def _allocate_rows(build: ModelBuild) -> torch.Tensor:
    """Return ``[rows of this rank, hidden_size]`` with the padding zeroed."""
    shard = split_padded(build.config.vocab_size, build.comm.rank, build.comm.size)
    weight = build.empty(shard.size, build.config.hidden_size)
    weight[shard.num_real :].zero_()
    return weight


def _vocab_target(weight: torch.Tensor, vocab_size: int, rows: slice) -> LoadTarget:
    """Place the real rows; a rank whose part is all padding keeps nothing."""
    num_real = rows.stop - rows.start
    shape = (vocab_size, weight.shape[1])
    if num_real == 0:
        return LoadTarget(None, shape)
    return LoadTarget(weight[:num_real], shape, (rows, slice(None)))
