"""Which part of a dimension each tensor-parallel rank keeps."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import ModelError


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous part of a dimension.

    Attributes:
        start: First index of the part.
        size: Length of the part as this rank allocates it.
        num_real: How many of its entries exist in the checkpoint; the rest is padding.
    """

    start: int
    size: int
    num_real: int

    @property
    def index(self) -> slice:
        """The entries to read from the checkpoint."""
        return slice(self.start, self.start + self.num_real)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The attention heads of one rank.

    Attributes:
        q: Its query heads.
        kv: Its KV heads; with more ranks than KV heads, several ranks keep the same one.
    """

    q: Shard
    kv: Shard


def split_evenly(what: str, total: int, rank: int, num_ranks: int) -> Shard:
    """Cut a dimension into equal parts.

    Raises:
        ModelError: It does not divide; ``what`` names it.
    """
    if total % num_ranks:
        raise ModelError(f"--tp {num_ranks}: must divide the model's {what}, which is {total}")
    size = total // num_ranks
    return Shard(rank * size, size, size)


def split_padded(total: int, rank: int, num_ranks: int) -> Shard:
    """Cut a dimension into equal parts, the last ones padded; a part may be all padding."""
    size = -(-total // num_ranks)
    start = min(rank * size, total)
    return Shard(start, size, min(size, total - start))


def split_heads(num_qo_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> HeadShard:
    """Give each rank its query heads and the KV heads that these attend to.

    Raises:
        ModelError: The query heads do not divide, or KV heads can be neither divided nor evenly
            replicated.
    """
    q = split_evenly("num_attention_heads", num_qo_heads, rank, num_ranks)
    if num_ranks <= num_kv_heads:
        return HeadShard(q, split_evenly("num_key_value_heads", num_kv_heads, rank, num_ranks))
    if num_ranks % num_kv_heads:
        raise ModelError(
            f"--tp {num_ranks}: must be a multiple of the model's num_key_value_heads, which is "
            f"{num_kv_heads}, so that each is on equally many ranks"
        )
    return HeadShard(q, Shard(rank * num_kv_heads // num_ranks, 1, 1))
