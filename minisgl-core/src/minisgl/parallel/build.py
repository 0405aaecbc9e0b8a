"""From a request to ranks."""

from __future__ import annotations

from minisgl.config.placement import Placement
from minisgl.errors import SettingsError
from minisgl.parallel.ranks import LocalRank, RankRequest, Ranks


def build_ranks(request: RankRequest) -> Ranks:
    """Build as many ranks as the settings say.

    Raises:
        SettingsError: This is not the first node.
        MinisglError: As for `build_engine`, of whichever rank.
    """
    placement = Placement.of(request.engine.settings.engine)
    if not placement.is_first:
        raise SettingsError(
            f"--node-rank {placement.node_rank}: whoever asks for tokens runs on node 0; start "
            "`minisgl serve` with the same settings on the other nodes"
        )
    if request.engine.settings.engine.tp == 1:
        return LocalRank(request)
    # Here, because a single rank has no use for sockets and processes.
    from minisgl.parallel.group import RankGroup  # noqa: PLC0415

    return RankGroup(request)
