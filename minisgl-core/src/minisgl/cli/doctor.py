"""``minisgl plugins doctor``: what is wrong with this installation, and what would mend it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from minisgl.cli.command_code import import_code
from minisgl.cli.parser import build_parser
from minisgl.config.tree import ENV_PREFIX, RESERVED_VARIABLES, nearest
from minisgl.errors import PluginError
from minisgl.plugin.discovery import CORE, KINDS, normalize
from minisgl.plugin.isolation import contain, details_of
from minisgl.plugin.machine import Machine
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.selection import import_factory
from minisgl.plugin.spec import ProbeContext
from minisgl.plugin.survey import survey

CUDA_COMPILERS = ("minisgl-kernels-cuda", "minisgl-attn-flashinfer")
"""Distributions that compile CUDA code at first use."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``problem`` makes the exit code 1; a ``note`` may or may not matter.
        subject: What was looked at.
        text: What was found, and what to do.
        details: A traceback, or empty.
    """

    level: Literal["ok", "note", "problem"]
    subject: str
    text: str
    details: str = ""


def examine(plugins: PluginManager, machine: Machine) -> list[Finding]:
    """Look at everything that can be wrong; imports what works here, heavy libraries included."""
    return [
        *_versions(plugins),
        *_environment(plugins),
        *_collisions(plugins),
        *_backends(plugins, machine),
        *_subcommands(plugins),
        *_load_errors(plugins),
        *_toolkits(plugins, machine),
    ]


def write_report(findings: list[Finding], is_json: bool) -> int:
    """Print findings.

    Returns:
        1 when there is a problem, else 0.
    """
    problems = [finding for finding in findings if finding.level == "problem"]
    if is_json:
        document = {"is_healthy": not problems, "findings": [asdict(each) for each in findings]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 1 if problems else 0
    for finding in findings:
        sys.stdout.write(f"{finding.level:<8} {finding.subject}: {finding.text}\n")
        sys.stdout.writelines(f"         {line}\n" for line in finding.details.splitlines())
    count = len(problems)
    plural = "" if count == 1 else "s"
    sys.stdout.write(f"{count} problem{plural} found\n" if count else "no problem found\n")
    return 1 if problems else 0


def _versions(plugins: PluginManager) -> Iterator[Finding]:
    """Compare what our distributions need with what is installed."""
    for name, number in sorted(plugins.catalog.versions.items()):
        misfits = list(_misfits(name))
        level: Literal["ok", "problem"] = "problem" if misfits else "ok"
        yield Finding(level, name, "; ".join([number, *misfits]))
    for name, places in _duplicates(plugins).items():
        yield Finding("problem", name, f"is installed {len(places)} times: {', '.join(places)}")


def _misfits(name: str) -> Iterator[str]:
    for text in requires(name) or []:
        req = Requirement(text)
        if req.marker is not None and not req.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(req.name)
        except PackageNotFoundError:
            yield f"needs {req.name}, which is not installed"
            continue
        if not req.specifier.contains(found, prereleases=True):
            yield f"needs {req}, and {found} is installed"


def _duplicates(plugins: PluginManager) -> dict[str, list[str]]:
    """Find our distributions whose metadata lie in two places; the first hides the others."""
    places: dict[str, list[str]] = {}
    for dist in distributions():
        name = dist.metadata["Name"]
        if name and normalize(name) in plugins.catalog.versions:
            place = f"{dist.version} in {dist.locate_file('')}"
            places.setdefault(normalize(name), []).append(place)
    # One folder may be on the path twice.
    return {name: found for name, found in places.items() if len(set(found)) > 1}


def _environment(plugins: PluginManager) -> Iterator[Finding]:
    tree = plugins.settings_tree()
    known = {*tree.by_variable, *RESERVED_VARIABLES}
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            yield Finding("problem", name, f"unknown environment variable{nearest(name, known)}")
    if plugins.catalog.blocked:
        names = ", ".join(sorted(plugins.catalog.blocked))
        yield Finding("note", "MINISGL_PLUGINS", f"leaves out {names}")


def _collisions(plugins: PluginManager) -> Iterator[Finding]:
    for kind in KINDS:
        for name in plugins.names(kind):
            offers = [o for o in plugins.catalog.offers if (o.kind, o.name) == (kind, name)]
            if len(offers) > 1:
                picks = " or ".join(f"{offer.distribution}:{name}" for offer in offers)
                text = f"is offered by {len(offers)} distributions; say {picks}"
                yield Finding("problem", f"{kind} backend {name!r}", text)


def _backends(plugins: PluginManager, machine: Machine) -> Iterator[Finding]:
    """Import the code of everything that says it works here."""
    probe = ProbeContext(device=machine.device, sm=machine.sm, dtype=machine.default_dtype)
    offers = {offer.key: offer for offer in plugins.catalog.offers}
    for row in survey(plugins, probe):
        subject = f"{row.kind} backend {row.name!r}"
        offer = offers[row.key]
        if not row.is_available:
            yield Finding("note", subject, f"does not work here: {row.reason}")
            continue
        try:
            contain(partial(import_factory, plugins.specs.load(offer).factory))
        except PluginError as error:
            text = f"{error}; reinstall {row.distribution}"
            yield Finding("problem", subject, text, details_of(error))
        else:
            yield Finding("ok", subject, f"works here, {row.distribution} {row.version}")


def _subcommands(plugins: PluginManager) -> Iterator[Finding]:
    """Import what runs each subcommand, and add its flags."""
    tree = plugins.settings_tree()
    for name, command in plugins.commands.items():
        try:
            build_parser(plugins, command, tree if command.has_settings else None)
            import_code(plugins, command, command.run)
            if command.complete_settings:
                import_code(plugins, command, command.complete_settings)
        except PluginError as error:
            yield Finding("problem", f"subcommand {name!r}", str(error), details_of(error))


def _load_errors(plugins: PluginManager) -> Iterator[Finding]:
    for failure in plugins.failures:
        yield Finding("problem", failure.subject, str(failure), failure.details)
    for offer in plugins.hooks.loaded:
        yield Finding("ok", offer.subject, f"loaded, {offer.distribution} {offer.version}")


def _toolkits(plugins: PluginManager, machine: Machine) -> Iterator[Finding]:
    yield Finding("ok", "pluggy", version("pluggy"))
    yield Finding("ok", "torch", version("torch"))
    if machine.gpu and machine.device == "cpu":
        text = f"{machine.note}, so the {machine.gpu} is not used; install a CUDA build of torch"
        yield Finding("problem", "gpu", text)
    elif machine.device == "cuda":
        yield Finding("ok", "gpu", f"{machine.gpu}, compute capability {machine.sm}")
    else:
        yield Finding("note", "gpu", "none found; everything runs on the CPU")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    inside = Path(home) / "bin/nvcc" if home else Path("/usr/local/cuda/bin/nvcc")
    nvcc = shutil.which("nvcc") or (str(inside) if inside.is_file() else "")
    users = [name for name in CUDA_COMPILERS if name in plugins.catalog.versions]
    if nvcc:
        yield Finding("ok", "nvcc", nvcc)
    elif users and machine.device == "cuda":
        text = f"not found, and {', '.join(users)} may need it to compile; set CUDA_HOME"
        yield Finding("note", "nvcc", text)
    else:
        yield Finding("note", "nvcc", "not found; nothing that is installed needs it here")
    if CORE not in plugins.catalog.versions:
        yield Finding("problem", CORE, f"its metadata are missing; reinstall {CORE}")
