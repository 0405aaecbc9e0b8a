"""From a request to ranks."""

from __future__ import annotations

from minisgl.parallel.ranks import LocalRank, RankRequest, Ranks


def build_ranks(request: RankRequest) -> Ranks:
    """Build as many ranks as the settings say.

    Raises:
        MinisglError: As for `build_engine`, of whichever rank.
    """
    if request.engine.settings.engine.tp == 1:
        return LocalRank(request)
    # Here, because a single rank has no use for sockets and processes.
    from minisgl.parallel.group import RankGroup  # noqa: PLC0415

    return RankGroup(request)
