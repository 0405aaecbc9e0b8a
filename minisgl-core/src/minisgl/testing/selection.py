"""Which backends a conformance run is about: ``--backend KIND[:NAME]``.

Besides the kinds of `minisgl.plugin.discovery` there is one for hook plugins: `HOOK_KIND`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minisgl.errors import PluginError, SettingsError
from minisgl.plugin.discovery import KINDS, Catalog, discover, normalize
from minisgl.plugin.isolation import contain
from minisgl.plugin.lookup import Lookup, Request
from minisgl.plugin.machine import Machine, read_machine
from minisgl.plugin.selection import Refusal, SelectedBackend
from minisgl.plugin.spec import PLUGIN_API, BackendSpec, Capabilities, Phase, ProbeContext
from minisgl.plugin.specs import SpecStore
from minisgl.testing.hook_backends import HOOK_KIND, HookBackends, call_with_engine

SUITES = Path(__file__).parent / "conformance"


@dataclass(frozen=True, slots=True)
class TestedBackend:
    """One backend under test.

    Attributes:
        kind: Such as ``"cache"``.
        name: The entry point's name, or the path that the user gave.
        spec: What it says of itself; a bare factory gets the spec of one that can do everything.
        capabilities: For attention, what it can do on this machine.
        factory: Builds it from the config of its kind.
        is_installed: Whether it was found by name; only then is its probe asked.
        machine: Where it is tested.
        is_bare: Whether no spec says what it can do; what it overrides says whether it captures.
    """

    kind: str
    name: str
    spec: BackendSpec
    capabilities: Capabilities
    factory: Callable[[Any], Any]  # Any: the config and interface depend on the kind
    is_installed: bool
    machine: Machine
    is_bare: bool = False

    __test__ = False  # the name makes pytest take it for a test

    def build(self, config: Any) -> Any:  # Any: as for the factory
        """Make the backend, with the defaults of its settings."""
        if self.spec.settings is not None:
            config = replace(config, settings=self.spec.settings())
        return self.factory(config)

    def refusal(self, **changes: Any) -> str:  # Any: fields of different types
        """Ask the probe about a machine and model.

        Args:
            changes: Fields of `ProbeContext` beyond device and compute capability.

        Returns:
            Why it would not work, or nothing.
        """
        if not self.is_installed:
            return ""
        answer = self.spec.probe(replace(context_of(self.machine), **changes))
        return "" if answer.ok else answer.reason or "its probe says no"

    def __str__(self) -> str:
        """Read as on the command line."""
        return f"{self.kind}:{self.name}"


def suite_kind(path: Path) -> str:
    """Return the kind that a suite's module is about; ``test_KIND.py`` or ``test_KIND_part.py``."""
    name = path.stem.removeprefix("test_")
    return next(kind for kind in (*KINDS, HOOK_KIND) if f"{name}_".startswith(f"{kind}_"))


def suite_kinds() -> tuple[str, ...]:
    """Return the kinds that have a suite, in alphabetical order."""
    return tuple(sorted({suite_kind(path) for path in SUITES.glob("test_*.py")}))


def context_of(machine: Machine) -> ProbeContext:
    """Return what probes are asked about when no model is named."""
    return ProbeContext(device=machine.device, sm=machine.sm, dtype=machine.default_dtype)


class BackendSelector:
    """Turns the ``--backend`` flags of a run into backends."""

    def __init__(self, device: str = "auto") -> None:
        """Look at what is installed.

        Args:
            device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

        Raises:
            SettingsError: There is no such device here.
        """
        self.machine = read_machine(device)
        if device == "cuda" and self.machine.device != "cuda":
            raise SettingsError(f"--backend-device cuda: {self.machine.note}; allowed: auto, cpu")
        self.refused: list[Refusal] = []
        self._catalog: Catalog = discover(os.environ.get("MINISGL_PLUGINS", ""))
        self._lookup = Lookup(self._catalog, SpecStore())

    def select(self, texts: Iterable[str]) -> list[TestedBackend]:
        """Resolve flags.

        Args:
            texts: Each ``KIND:NAME``, where the name is that of an installed backend, or the
                ``package.module:attribute`` of a `BackendSpec` or a factory; or ``KIND`` for all
                that are installed and work here. A logits processor is named by the entry point
                or the distribution of its hook plugin, or by the path of the hook's function.

        Returns:
            The backends, in the order given. `refused` has those that do not work here.

        Raises:
            SettingsError: A text is malformed, or there is no suite for its kind.
            PluginError: A backend is not installed, does not work here or cannot be imported.
        """
        selected: list[TestedBackend] = []
        for text in texts:
            kind, has_name, name = text.partition(":")
            if kind not in suite_kinds() or (has_name and not name):
                raise SettingsError(
                    f"--backend {text}: must be KIND:NAME such as cache:radix, or KIND for all "
                    f"that are installed; kinds: {', '.join(suite_kinds())}"
                )
            selected += [self._named(kind, name)] if name else self._all_installed(kind)
        return selected

    def _all_installed(self, kind: str) -> list[TestedBackend]:
        if kind == HOOK_KIND:
            return [self._hook_plugin(name) for name in HookBackends(self._catalog).names()]
        phases: tuple[Phase, ...] = ()
        request = Request(kind, "auto", context_of(self.machine), is_dry=False)
        usable, refused = self._lookup.ranked(request, phases)
        self.refused += refused
        if not usable:
            reasons = "; ".join(map(str, refused)) or "nothing is installed"
            raise PluginError(f"--backend {kind}: nothing to test: {reasons}")
        return [self._installed(found) for found in usable]

    def _named(self, kind: str, name: str) -> TestedBackend:
        owner, has_owner, _ = name.rpartition(":")
        if has_owner and normalize(owner) not in self._catalog.versions:
            return self._by_path(kind, name)
        if kind == HOOK_KIND:
            return self._hook_plugin(name)
        request = Request(kind, name, context_of(self.machine), is_dry=False)
        return self._installed(self._lookup.named(request, name, ()))

    def _installed(self, found: SelectedBackend) -> TestedBackend:
        return TestedBackend(
            kind=found.kind,
            name=found.name,
            spec=found.spec,
            capabilities=found.capabilities,
            factory=found.load(),
            is_installed=True,
            machine=self.machine,
        )

    def _hook_plugin(self, name: str) -> TestedBackend:
        """Load the hook plugin that a name means."""
        offer, factory = HookBackends(self._catalog).find(name)
        return TestedBackend(
            kind=HOOK_KIND,
            name=name,
            spec=BackendSpec(PLUGIN_API, factory=offer.entry_point.value),
            capabilities=Capabilities(),
            factory=factory,
            is_installed=False,  # a hook plugin has no probe
            machine=self.machine,
        )

    def _by_path(self, kind: str, path: str) -> TestedBackend:
        """Import a spec or a factory that need not be installed."""
        found = _import_path(kind, path)
        is_bare = not isinstance(found, BackendSpec)
        spec = BackendSpec(PLUGIN_API, factory=path) if is_bare else found
        factory = _import_path(kind, spec.factory)
        return TestedBackend(
            kind=kind,
            name=path,
            spec=spec,
            capabilities=spec.capabilities,
            factory=call_with_engine(factory) if kind == HOOK_KIND else factory,
            is_installed=False,
            machine=self.machine,
            is_bare=is_bare,
        )


def _import_path(kind: str, path: str) -> Any:  # Any: whatever the module holds
    module, _, attribute = path.partition(":")
    try:
        return contain(lambda: getattr(importlib.import_module(module), attribute))
    except PluginError as error:
        raise PluginError(f"--backend {kind}:{path}: {error}") from error
