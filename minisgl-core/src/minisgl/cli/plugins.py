"""``minisgl plugins``: what is installed, whether it works here, and what ``auto`` picks."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace

from minisgl.cli.doctor import examine, write_report
from minisgl.errors import SettingsError
from minisgl.plugin.commands import CommandContext
from minisgl.plugin.machine import Machine, read_machine
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ProbeContext
from minisgl.plugin.survey import Row, survey

DTYPES = ("auto", "float32", "float16", "bfloat16")
_HEADER = ("KIND", "NAME", "DISTRIBUTION", "VERSION", "WORKS", "AUTO", "NOTE")


def run(context: CommandContext) -> int:
    """List backends; with ``doctor``, look for what is wrong.

    Returns:
        1 when the doctor found a problem, else 0.

    Raises:
        SettingsError: An argument is not known.
        ModelError: ``--model`` cannot be opened.
    """
    arguments = context.arguments
    if context.positionals not in ((), ("doctor",)):
        raise SettingsError(
            f"minisgl plugins {' '.join(context.positionals)}: may be doctor or new"
        )
    wanted = _checked("--device", arguments.device, r"auto|cpu|cuda(:\d{1,3})?")
    machine = read_machine(wanted)
    if context.positionals:
        return write_report(examine(context.plugins, machine), arguments.json)
    probe = probe_context(context.plugins, machine, arguments)
    rows = survey(context.plugins, probe)
    if arguments.json:
        document = _document(context.plugins, machine, probe, rows)
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _write_table(context.plugins, machine, probe, rows)
    return 0


def probe_context(plugins: PluginManager, machine: Machine, arguments: Namespace) -> ProbeContext:
    """Describe the machine, and the model where one is named, to probes.

    Raises:
        SettingsError: The dtype is not known.
        ModelError: The model cannot be opened.
    """
    dtype = _checked("--dtype", arguments.dtype, "|".join(DTYPES))
    is_auto = dtype == "auto"
    context = ProbeContext(
        device=machine.device, sm=machine.sm, dtype=machine.default_dtype if is_auto else dtype
    )
    if arguments.model is None:
        return context
    # Only here, because reading a checkpoint's configuration imports torch.
    from minisgl.cli.model_probe import describe_model  # noqa: PLC0415

    described = describe_model(plugins, arguments.model, context)
    return described if is_auto else replace(described, dtype=dtype)


def _checked(flag: str, value: str | None, pattern: str) -> str:
    """Return an argument that matches, ``auto`` where it was not given."""
    if value is not None and not re.fullmatch(pattern, value):
        allowed = pattern.replace(r"(:\d{1,3})?", ", cuda:N").replace("|", ", ")
        raise SettingsError(f"{flag} {value}: must be one of {allowed}")
    return value or "auto"


def _document(
    plugins: PluginManager, machine: Machine, probe: ProbeContext, rows: Sequence[Row]
) -> dict[str, object]:
    """Everything that the table shows, for machines."""
    return {
        "machine": asdict(machine),
        "asked_for": asdict(probe),
        "backends": [asdict(row) for row in rows],
        "hooks": [
            {"name": offer.name, "distribution": offer.distribution, "version": offer.version}
            for offer in plugins.hooks.loaded
        ],
        "subcommands": sorted(plugins.commands),
        "left_out": sorted(plugins.catalog.blocked),
        "failures": [asdict(failure) for failure in plugins.failures],
    }


def _write_table(
    plugins: PluginManager, machine: Machine, probe: ProbeContext, rows: Sequence[Row]
) -> None:
    place = f"{machine.gpu}, compute capability {machine.sm}" if machine.sm else "cpu"
    notes = [text for text in (machine.note, machine.gpu) if text and not machine.sm]
    note = f" ({': '.join(notes)})" if notes else ""
    lines = [f"asked for: {place}{note}, {probe.dtype}", ""]
    lines += _aligned([_HEADER, *(_cells(row) for row in rows)])
    hooks = [f"{offer.name} ({offer.distribution})" for offer in plugins.hooks.loaded]
    lines += ["", f"hook plugins: {', '.join(hooks) or 'none'}"]
    if plugins.catalog.blocked:
        lines.append(f"left out by MINISGL_PLUGINS: {', '.join(sorted(plugins.catalog.blocked))}")
    if plugins.failures:
        lines.append(f"{len(plugins.failures)} failed to load: see `minisgl plugins doctor`")
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    names = "/".join((row.name, *row.aliases))
    note = row.summary if row.is_available else row.reason
    works = "yes" if row.is_available else "no"
    return row.kind, names, row.distribution, row.version, works, row.auto or "-", note


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in table
    ]
