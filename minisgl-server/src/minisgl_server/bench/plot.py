"""A picture of a benchmark: how times are distributed, and the throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.errors import SettingsError
from minisgl_server.bench.http_stream import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg", ".pdf")
_NUM_BINS = 60


def check_plot(path: Path) -> None:
    """See that a plot can be made there, before the benchmark runs.

    Raises:
        SettingsError: The format is unknown, the folder is missing, or matplotlib is.
    """
    if path.suffix.lower() not in _FORMATS:
        raise SettingsError(f"--plot {path}: must end in {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise SettingsError(
            f"--plot {path}: needs matplotlib; pip install 'minisgl-server[plot]'"
        ) from error


def write_plot(path: Path, timings: Sequence[Timing], title: str) -> None:
    """Draw the requests that succeeded.

    Args:
        path: Of the picture; its ending is the format.
        timings: Of all requests.
        title: Of the whole.

    Raises:
        SettingsError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    good = [timing for timing in timings if not timing.error]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a name may have any letters
    first, gaps, whole, rate = figure.subplots(2, 2).flat
    _distribution(first, "time to first token", [1000 * t.first_token_s for t in good])
    _distribution(gaps, "time between tokens", [1000 * gap for t in good for gap in t.gaps_s])
    _distribution(whole, "whole request", [1000 * t.total_s for t in good])
    _rate(rate, good)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SettingsError(f"--plot {path}: cannot be written: {error}") from error


def _distribution(axes: Axes, name: str, values_ms: Sequence[float]) -> None:
    """Draw which share of the values is at most how large, with the percentiles of the table."""
    axes.set(title=name, xlabel="ms", ylabel="share", ylim=(0, 1.02), xlim=(0, None))
    axes.grid(alpha=0.3)
    if not values_ms:
        return
    ordered = sorted(values_ms)
    axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
    for percent, style in ((50, "--"), (99, ":")):
        value = ordered[min(len(ordered) - 1, -(-percent * len(ordered) // 100) - 1)]
        axes.axvline(value, linestyle=style, color="gray", label=f"p{percent} {value:.1f} ms")
    axes.set_xlim(0, max(1e-3, 1.05 * ordered[-1]))
    axes.legend(loc="lower right")


def _rate(axes: Axes, timings: Sequence[Timing]) -> None:
    """Draw pieces of text per second, and how many requests were open."""
    axes.set(title="over time", xlabel="s", ylabel="pieces of text per s")
    axes.grid(alpha=0.3)
    if not timings:
        return
    start = min(timing.start_s for timing in timings)
    end = max(timing.end_s for timing in timings)
    width = max(1e-3, (end - start) / _NUM_BINS)
    counts = [0] * (_NUM_BINS + 1)
    for timing in timings:
        for piece_s in timing.piece_s:
            counts[int((piece_s - start) / width)] += 1
    axes.step([i * width for i in range(len(counts))], [c / width for c in counts], where="post")
    changes = sorted([(t.start_s, 1) for t in timings] + [(t.end_s, -1) for t in timings])
    times, open_now = [0.0], [0]
    for (moment, change), _ in pairwise([*changes, (end, 0)]):
        times.append(moment - start)
        open_now.append(open_now[-1] + change)
    other = axes.twinx()
    other.step(times, open_now, where="post", color="tab:orange", alpha=0.7)
    other.set_ylabel("open requests", color="tab:orange")
    other.set_ylim(0, None)
    axes.set_xlim(0, max(1e-3, end - start))
