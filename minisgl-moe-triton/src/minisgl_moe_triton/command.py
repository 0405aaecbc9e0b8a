"""``minisgl bench moe``, where Triton is."""

from __future__ import annotations

from importlib.util import find_spec

from minisgl.errors import SettingsError
from minisgl.plugin.commands import CommandContext


def run(context: CommandContext) -> int:
    """Time the fused MoE; see `minisgl_moe_triton.bench.run`.

    Raises:
        SettingsError: Triton is not installed, or an argument is wrong.
    """
    if find_spec("triton") is None:
        raise SettingsError("minisgl bench moe: package triton is not installed")
    # Only here, so that whoever looks at the command does not need Triton.
    from minisgl_moe_triton import bench  # noqa: PLC0415

    return bench.run(context)
