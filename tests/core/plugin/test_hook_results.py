"""What a hook returns is checked; whoever returns anything else is left out, and named."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from minisgl.core import Req
from minisgl.errors import ProcessorError
from minisgl.plugin import hooks
from minisgl.plugin.commands import Subcommand
from minisgl.plugin.discovery import Catalog, Offer, discover
from minisgl.plugin.hook_plugins import HookPlugins
from minisgl.plugin.hookspecs import hookimpl
from minisgl.plugin.manager import PluginManager
from tests.core.plugin.test_hooks import ENGINE


class Gives:
    """A hook plugin that returns the same to whichever hook asks."""

    def __init__(self, result: object) -> None:
        self._result = result

    @hookimpl
    def minisgl_subcommands(self) -> object:
        return self._result

    @hookimpl
    def minisgl_logits_processors(self) -> object:
        return self._result


class Strict(BaseModel):
    """A section that cannot be left alone."""

    needed: int


GOOD = Subcommand("good", "fine", "a.b:run")
COMMANDS = {
    "bare": (GOOD, "is not a list of Subcommands; put it into a list: [Subcommand]"),
    "number": (5, "returned 5, which is not a list of Subcommands"),
    "text": ("run", "returned 'run', which is not a list of Subcommands"),
    "items": ([GOOD, 5], "returned a list with 5, which is not a Subcommand"),
    "twice": ([GOOD, replace(GOOD, summary="more")], "it offers 2 subcommands 'good'"),
    "unnamed": ([replace(GOOD, name="")], "name is '', and one or two words"),
    "flag": ([replace(GOOD, name="--good")], "name is '--good', and one or two words"),
    "help": ([replace(GOOD, name="help")], "other than 'help'"),
    "summary": ([replace(GOOD, summary=None)], "'good': summary is None, which is not str"),  # type: ignore[arg-type]  # on purpose
    "run": ([replace(GOOD, run="a.b")], "run is 'a.b', which is not 'package.module:function'"),
    "flags": ([replace(GOOD, add_arguments=7)], "add_arguments is 7, not a function"),  # type: ignore[arg-type]  # on purpose
    "sections": ([replace(GOOD, sections=(3,))], "sections have 3, which is no pydantic model"),  # type: ignore[arg-type]  # on purpose
    "needy": ([replace(GOOD, sections=(Strict,))], "cannot be left to their defaults"),
}
PLUGINS = {name: Gives(result) for name, (result, _) in COMMANDS.items()}


def processor(logits: Tensor, reqs: Sequence[Req]) -> None:
    raise RuntimeError(f"no more of {len(reqs)}")


PROCESSORS = {
    "bare": (processor, "is not a list of functions; put it into a list: [function]"),
    "items": ([processor, 5], "returned a list with 5, which is not a function"),
}
EDITORS = {name: Gives(result) for name, (result, _) in PROCESSORS.items()}
RAISES = Gives([processor])
CORES = Gives([Subcommand("version", "not the core's", "a.b:run")])


def offer(place: str, name: str = "mine") -> Offer:
    """Make what metadata would say of ``place``, in this module."""
    point = EntryPoint(name, f"{__name__}:{place}", "minisgl")
    return Offer("minisgl", name, "acme-hooks", "1.0", point)


def table(name: str, entries: dict[str, Gives], monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Make an offer of one entry, which is an attribute for as long as the test runs."""
    monkeypatch.setattr(sys.modules[__name__], "CHOSEN", entries[name], raising=False)
    return offer("CHOSEN")


def catalog(*offers: Offer) -> Catalog:
    """Return what is installed, with hook plugins behind those of the core."""
    found = discover()
    core = tuple(each for each in found.hooks if each.distribution == "minisgl-core")
    return replace(found, hooks=(*core, *offers))


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_subcommands_leave_their_plugin_out(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plugins = PluginManager(catalog(table(name, PLUGINS, monkeypatch)))
    (failure,) = plugins.failures
    assert failure.reason.startswith("minisgl_subcommands: ")
    assert COMMANDS[name][1] in failure.reason
    assert caplog.messages == [f"{failure}; it is left out, see `minisgl plugins doctor`"]
    assert "good" not in plugins.commands
    assert {"generate", "plugins", "version"} <= set(plugins.commands)


def test_the_core_keeps_its_names_wherever_a_plugin_is_installed() -> None:
    plugins = PluginManager(catalog(offer("CORES")))
    assert plugins.owners["version"].distribution == "minisgl-core"
    (failure,) = plugins.failures
    assert "the subcommand 'version' is taken, by minisgl-core" in failure.reason


def test_two_entry_points_of_one_module_are_said_to_be_so() -> None:
    found = HookPlugins()
    found.load([offer("RAISES", "first"), offer("RAISES", "second")])
    assert [each.name for each in found.loaded] == ["first"]
    (failure,) = found.failures
    assert failure.subject == "hook plugin 'second'"
    assert "is registered already, as 'first'; one entry point is enough" in failure.reason


@pytest.mark.parametrize("name", PROCESSORS)
def test_wrong_logits_processors_leave_their_plugin_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = HookPlugins()
    found.load([table(name, EDITORS, monkeypatch)])
    assert hooks.logits_processors(found, ENGINE) == ()
    (failure,) = found.failures
    assert PROCESSORS[name][1] in failure.reason


def test_a_logits_processor_that_raises_names_its_plugin() -> None:
    found = HookPlugins()
    found.load([offer("RAISES")])
    (named,) = hooks.logits_processors(found, ENGINE)
    wanted = (
        "hook plugin 'mine' of acme-hooks 1.0: its logits processor failed: "
        "RuntimeError: no more of 0"
    )
    with pytest.raises(ProcessorError, match=wanted) as caught:
        named(torch.zeros(0, 8), [])
    assert isinstance(caught.value.__cause__, RuntimeError)
