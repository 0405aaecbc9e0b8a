"""A server that takes its time: what a test does before an answer ends has that long."""

from __future__ import annotations

import os
from pathlib import Path

from tests.core.plugin.throwaway import Throwaway

STEP_S = 0.05
"""Least seconds between tokens; an answer of 1900 tokens takes a minute and a half."""

_PACE = Throwaway(
    "minisgl-pace",
    {
        "minisgl_pace.py": f"""
    import time

    from minisgl.plugin.hookspecs import hookimpl

    @hookimpl
    def minisgl_step_finished():
        time.sleep({STEP_S})
    """
    },
    {"minisgl": {"pace": "minisgl_pace"}},
)


def pace_wheel(folder: Path) -> Path:
    """Make what has to be on the path of a process whose steps take at least `STEP_S` each."""
    return _PACE.build_wheel(folder)


def pace_env(folder: Path) -> dict[str, str]:
    """The environment in which each step takes at least `STEP_S`."""
    paths = [str(pace_wheel(folder)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
