"""From a request to ranks."""

from __future__ import annotations

from minisgl.config.load import Settings
from minisgl.config.placement import Placement
from minisgl.errors import SettingsError
from minisgl.parallel.ranks import LocalRank, RankRequest, Ranks


def check_first_node(settings: Settings) -> None:
    """Refuse a node that is not the first, before anything is opened.

    Raises:
        SettingsError: It is not, or settings of nodes do not fit together.
    """
    placement = Placement.of(settings.engine)
    if not placement.is_first:
        raise SettingsError(
            f"--node-rank {placement.node_rank}: whoever asks for tokens runs on node 0; start "
            "`minisgl serve` with the same settings on the other nodes"
        )


def build_ranks(request: RankRequest) -> Ranks:
    """Build as many ranks as the settings say, on the first node.

    Raises:
        MinisglError: As for `build_engine`, of whichever rank.
    """
    if request.engine.settings.engine.tp == 1:
        return LocalRank(request)
    # Here, because a single rank has no use for sockets and processes.
    from minisgl.parallel.group import RankGroup  # noqa: PLC0415

    return RankGroup(request)
