"""``minisgl replay``: run a trace again, and say where behaviour differs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.config.load import Given, Settings
from minisgl.config.sections import RecordSettings
from minisgl.config.tree import SettingsTree
from minisgl.errors import MinisglError, SettingsError
from minisgl.plugin.commands import CommandContext
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ProbeContext

if TYPE_CHECKING:
    from minisgl.engine.build import EngineRequest
    from minisgl.engine.contract import StepEngine
    from minisgl.replay.compare import Report, Totals
    from minisgl.scheduler.trace import Header, Trace

logger = logging.getLogger(__name__)

_LIMITS = {
    "page_size": "page_size",
    "num_pages": "num_pages",
    "max_running_requests": "max_running_reqs",
    "max_seq_len_override": "max_seq_len",
}
"""Settings that are the recorded engine's sizes, whatever these were worked out from."""

_OF_ONE_RANK = ("tp", "nnodes", "node_rank", "master")
"""Settings of which a replay has the defaults."""


def recorded_settings(
    words: Sequence[str], given: Mapping[str, Given], tree: SettingsTree
) -> dict[str, Given]:
    """Return the settings of the trace, with the flags of the command line over them.

    With another page size and no other number of pages the pool holds as many tokens as before.

    Raises:
        SettingsError: No trace is named, or it cannot be read.
    """
    path = _path_of(words)
    header = _read(path).header
    merged: dict[str, Given] = {}
    for name, value in header.settings.items():
        if name in tree.by_path:
            merged[name] = Given(value, f"{path}: {name}")
        else:
            logger.warning("%s: the setting %s is unknown here and left out", path, name)
    for name, limit in _LIMITS.items():
        merged[name] = Given(getattr(header.limits, limit), f"{path}: {limit}")
    for name in (*_OF_ONE_RANK, *RecordSettings.model_fields):
        if name in given:
            rule = "has one rank" if name in _OF_ONE_RANK else "is not recorded"
            raise SettingsError(f"{given[name].origin}: a replay {rule}")
        merged[name] = Given(tree.by_path[name].default, f"{path}: {name}")
    num_ranks = header.settings.get("tp", 1)
    if num_ranks != 1:
        logger.warning(
            "%s: was recorded with %s ranks and is replayed with one, which rounds its sums "
            "otherwise: tokens may differ, decisions do not",
            path,
            num_ranks,
        )
    if "page_size" in given and "num_pages" not in given:
        merged["num_pages"] = _scaled_pages(header, given["page_size"], path)
    return {**merged, **given}


def run(context: CommandContext) -> int:
    """Replay; 0 when nothing differs, 1 when something does.

    Raises:
        SettingsError: No trace is named, it cannot be read, or it cannot be run here with these
            settings.
    """
    path = _path_of(context.positionals)
    trace = _read(path)
    try:
        report = _replay(context, trace)
    except SettingsError:
        raise
    except MinisglError as error:  # another exit status than that of a difference
        raise SettingsError(f"{path}: cannot be replayed: {error}") from error
    if context.arguments.json:
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        sys.stdout.write(describe(report))
    return 0 if report.first is None else 1


def describe(report: Report) -> str:
    """Write a report for people."""
    lines = []
    if report.first is None:
        compared = "decisions and tokens" if report.has_tokens else "decisions"
        lines.append(f"no difference: {compared} are those of the recording")
    else:
        lines.append(f"differs at tick {report.first.tick}: {report.first.text}")
        lines.append(f"steps that differ: {report.num_different_steps}")
        if report.differing_tokens:
            lines.append(f"requests with other tokens: {len(report.differing_tokens)}")
    if not report.is_complete:
        lines.append("the recording was cut off; what comes after its last line is not compared")
    lines += _table(report.recorded, report.replayed)
    return "\n".join(lines) + "\n"


def _table(recorded: Totals, replayed: Totals) -> list[str]:
    rows = [
        ("prefill steps", recorded.num_prefill_steps, replayed.num_prefill_steps),
        ("decode steps", recorded.num_decode_steps, replayed.num_decode_steps),
        ("prefill tokens", recorded.num_prefill_tokens, replayed.num_prefill_tokens),
        ("cached tokens", recorded.num_cached_tokens, replayed.num_cached_tokens),
        ("retractions", recorded.num_retractions, replayed.num_retractions),
    ]
    reasons = sorted({*recorded.finished, *replayed.finished})
    rows += [
        (f"ended: {reason}", recorded.finished.get(reason, 0), replayed.finished.get(reason, 0))
        for reason in reasons
    ]
    lines = [f"{'':16}{'recorded':>12}{'here':>12}"]
    return lines + [f"{name:16}{before:>12}{now:>12}" for name, before, now in rows]


def _replay(context: CommandContext, trace: Trace) -> Report:
    # Only now, because they import torch: a wrong flag is reported without waiting for that.
    from minisgl.engine.build import build_engine, describe_to_probes  # noqa: PLC0415
    from minisgl.replay.run import Replay  # noqa: PLC0415
    from minisgl.scheduler.build import SchedulerBackends, build_scheduler  # noqa: PLC0415

    settings, plugins = context.filled_settings, context.plugins
    if context.arguments.decisions_only:
        # No device and no model take part, so there is no more to tell.
        probe = ProbeContext(page_size=settings.engine.page_size)
        backends = SchedulerBackends.resolve(plugins, settings, probe)
        idle = _idle_engine(trace.header, settings)
        build = partial(build_scheduler, backends, settings)
        return Replay(trace, idle, build, has_model=False).run()
    request = _engine_request(trace.header, settings, plugins)
    backends = SchedulerBackends.resolve(plugins, settings, describe_to_probes(request))
    engine = build_engine(request)
    try:
        return Replay(trace, engine, partial(build_scheduler, backends, settings)).run()
    finally:
        engine.shutdown()


def _path_of(words: Sequence[str]) -> Path:
    if len(words) != 1:
        raise SettingsError(f"FILE: {'one trace at a time' if words else 'is missing'}")
    return Path(words[0]).expanduser()


def _read(path: Path) -> Trace:
    from minisgl.scheduler.trace_reading import read_trace  # noqa: PLC0415

    return read_trace(path)


def _scaled_pages(header: Header, page_size: Given, path: Path) -> Given:
    """Return how many pages of another size hold as many tokens."""
    num_tokens = header.limits.num_pages * header.limits.page_size
    text = str(page_size.value)
    # What is no number at all is refused where all settings are checked.
    size = int(text) if text.isdecimal() and int(text) > 0 else header.limits.page_size
    return Given(max(1, num_tokens // size), f"{path}: num_pages")


def _idle_engine(header: Header, settings: Settings) -> StepEngine:
    from minisgl.engine.contract import EngineLimits  # noqa: PLC0415
    from minisgl.replay.engine import IdleEngine  # noqa: PLC0415

    engine, recorded = settings.engine, header.limits
    num_pages = _settled("--num-pages", engine.num_pages, recorded.num_pages)
    page_size = _settled("--page-size", engine.page_size, recorded.page_size)
    max_seq_len = settings.model.max_seq_len_override or recorded.max_seq_len
    limits = EngineLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_running_reqs=engine.max_running_requests,
        max_seq_len=min(max_seq_len, num_pages * page_size),
        vocab_size=recorded.vocab_size,
        eos_token_ids=frozenset(recorded.eos_token_ids),
    )
    return IdleEngine(limits)


def _settled(flag: str, value: int | None, recorded: int) -> int:
    """Return a size that the command line must not leave open."""
    if value is None:
        raise SettingsError(
            f"{flag} auto: with --decisions-only there is no device that would settle it; allowed: "
            f"an integer, or nothing for the {recorded} of the trace"
        )
    return value


def _engine_request(header: Header, settings: Settings, plugins: PluginManager) -> EngineRequest:
    from minisgl.engine.build import EngineRequest  # noqa: PLC0415
    from minisgl.weights.resolve import open_configured  # noqa: PLC0415

    return EngineRequest(
        settings,
        plugins,
        open_configured(settings, plugins),
        eos_token_ids=frozenset(header.limits.eos_token_ids),
        show_progress=sys.stderr.isatty(),
    )
