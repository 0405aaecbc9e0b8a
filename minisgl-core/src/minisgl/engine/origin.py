"""Whose backend it was that raised while a step was run, as the traceback tells."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from traceback import walk_tb
from types import TracebackType

from minisgl.errors import BackendError, MinisglError
from minisgl.plugin.discovery import CORE
from minisgl.plugin.isolation import describe
from minisgl.plugin.selection import SelectedBackend

# What a kernel does wrong, a later call of anybody reports, and all use the memory that is short.
_OF_DEVICE = re.compile(
    r"cuda.{0,12}error|error.{0,3}cuda|illegal memory access|misaligned address|launch failure"
    r"|out of memory",
    re.IGNORECASE,
)


class ErrorOrigin:
    """Around a step: what a plugin's backend raises becomes a `BackendError` that names it.

    Errors of ours pass as they are, and so does what comes from nobody for certain: what the core
    raises without a plugin, or below no other than the model, and errors of the device, which
    surface wherever the host is by then.
    """

    def __init__(self, backends: Iterable[SelectedBackend] = ()) -> None:
        """Look for these backends; those of the core are left out."""
        distinct = {each.key: each for each in backends if each.distribution != CORE}
        self._backends = list(distinct.values())

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Name the origin of an error.

        Raises:
            BackendError: There is an error, and its origin is known.
        """
        if not isinstance(error, Exception) or isinstance(error, MinisglError):
            return
        origin = "" if _OF_DEVICE.search(str(error)) else self._find(traceback)
        if origin:
            raise BackendError(f"{origin}: a step failed: {describe(error)}") from error

    def _find(self, traceback: TracebackType | None) -> str:
        """Return what to call the innermost of the backends in a traceback, or nothing."""
        frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(traceback)]
        modules = frames[::-1]  # innermost first
        for depth, module in enumerate(modules):
            inside = [each for each in self._backends if _is_of(each, module)]
            found = _entered(inside, modules[depth:])
            # All that the core computes is called by a model, whose fault it need not be.
            is_below_core = any(_is_in("minisgl", called) for called in modules[:depth])
            if found and not (is_below_core and any(each.kind == "model" for each in found)):
                return _name(found)
        return ""


def _entered(backends: list[SelectedBackend], modules: list[str]) -> list[SelectedBackend]:
    """Leave the one of a package's backends that the core called, where modules tell it."""
    inside = takewhile(lambda module: not _is_in("minisgl", module), modules)
    homes = [module for module in inside if module in map(_module_of, backends)]
    return [each for each in backends if _module_of(each) in homes[-1:]] or backends


def _name(backends: list[SelectedBackend]) -> str:
    """Name a backend, or else the distribution that several are of."""
    if len(backends) == 1:
        return backends[0].subject
    owners = {f"{each.distribution} {each.version}" for each in backends}
    return owners.pop() if len(owners) == 1 else ""


def _is_of(backend: SelectedBackend, module: str) -> bool:
    """Return whether a module is that of a backend's factory, or stands in the same package."""
    home = _module_of(backend)
    return _is_in(home.rpartition(".")[0] or home, module)


def _module_of(backend: SelectedBackend) -> str:
    return backend.spec.factory.partition(":")[0]


def _is_in(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")
