"""Which ranks run on which node: ``--tp``, ``--nnodes``, ``--node-rank`` and ``--master``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.errors import SettingsError

if TYPE_CHECKING:
    from minisgl.config.sections import EngineSettings

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Placement:
    """This node's part of a tensor-parallel group; nodes have equally many ranks, in order.

    Attributes:
        nnodes: Nodes.
        node_rank: This one's number, from 0.
        ranks: The ranks that run here.
        master: ``host:port`` of node 0, or nothing with one node.
    """

    nnodes: int
    node_rank: int
    ranks: range
    master: str

    @classmethod
    def of(cls, settings: EngineSettings) -> Placement:
        """Read the settings.

        Raises:
            SettingsError: They do not fit together.
        """
        tp, nnodes, node_rank = settings.tp, settings.nnodes, settings.node_rank
        if tp % nnodes:
            raise SettingsError(f"--nnodes {nnodes}: must divide --tp, which is {tp}")
        if node_rank >= nnodes:
            raise SettingsError(
                f"--node-rank {node_rank}: allowed: 0 to {nnodes - 1}, as --nnodes is {nnodes}"
            )
        if nnodes > 1:
            _check_master(settings.master, nnodes)
        size = tp // nnodes
        ranks = range(node_rank * size, (node_rank + 1) * size)
        return cls(nnodes, node_rank, ranks, settings.master or "" if nnodes > 1 else "")

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is here, and with it whoever asks for tokens."""
        return self.node_rank == 0

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank among those of this node, which is that of its device."""
        return rank - self.ranks.start

    def rendezvous(self, local: str) -> str:
        """Return where the ranks meet: ``local``, a file, where all of them are on one node."""
        return f"tcp://{self.master}" if self.nnodes > 1 else local


def _check_master(master: str | None, nnodes: int) -> None:
    if master is None:
        raise SettingsError(f"--nnodes {nnodes}: needs --master HOST:PORT, an address of node 0")
    port = int(master.rpartition(":")[2])
    if not 0 < port <= _MAX_PORT:
        raise SettingsError(f"--master {master}: the port must be from 1 to {_MAX_PORT}")
