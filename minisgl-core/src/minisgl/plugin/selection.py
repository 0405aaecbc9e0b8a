"""What resolution returns: chosen backends, and why the others were refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from minisgl.errors import MinisglError, PluginError
from minisgl.plugin.isolation import contain, describe
from minisgl.plugin.spec import SMALL_DECODE_REQS, Availability, BackendSpec, Capabilities

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SelectedBackend:
    """A backend that was picked; nothing heavy is imported until `load` or `build`.

    Attributes:
        kind: Its kind.
        name: Its entry point's name, whatever alias it was asked for by.
        distribution: Where it comes from.
        version: Of the distribution.
        spec: What the distribution says about it.
        availability: The answer of its probe.
        is_named: Whether the user asked for it, rather than ``auto``.
    """

    kind: str
    name: str
    distribution: str
    version: str
    spec: BackendSpec
    availability: Availability
    is_named: bool

    @property
    def key(self) -> str:
        """Unique name; ``settings.plugin(selected.key)`` is its settings section."""
        return f"{self.kind}/{self.distribution}:{self.name}"

    @property
    def capabilities(self) -> Capabilities:
        """What it can do on this machine."""
        return self.availability.capabilities or self.spec.capabilities

    def load(self) -> Callable[[Any], Any]:  # Any: each kind has its config and backend
        """Import the factory.

        Raises:
            PluginError: It cannot be imported; the message names backend, distribution and cause.
        """
        try:
            return contain(lambda: import_factory(self.spec.factory))
        except PluginError as error:
            raise PluginError(f"{self.subject}: {error}{self._advice()}") from error.__cause__

    def build(
        self, config: Any, contract: type = object
    ) -> Any:  # Any: each kind has its config and backend
        """Make the backend with the ``…Config`` of its kind.

        Args:
            config: The ``…Config``.
            contract: What the backend has to be an instance of.

        Raises:
            PluginError: Its code cannot be imported, at once or when it starts, or the factory
                raises what is no error of ours, or makes something else; the message names
                backend, distribution and cause. An error of ours passes as it is.
        """
        factory = self.load()
        try:
            built = factory(config)
        except MinisglError:
            raise
        except (ImportError, OSError) as error:
            raise PluginError(f"{self.subject}: {describe(error)}{self._advice()}") from error
        except Exception as error:
            logger.exception("what the %s raised", self.subject)
            raise PluginError(f"{self.subject}: its factory failed: {describe(error)}") from error
        if not isinstance(built, contract):
            made = f"its factory made {built!r:.80}, which is not a {contract.__name__}"
            raise PluginError(f"{self.subject}: {made}")
        return built

    def __str__(self) -> str:
        """Show name and origin."""
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def subject(self) -> str:
        """What to call it in a message."""
        return f"{self.kind} backend {self.name!r} of {self.distribution} {self.version}"

    def _advice(self) -> str:
        return f"; reinstall {self.distribution} or pick another backend"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backend that was not picked.

    Attributes:
        name: Its name.
        distribution: Where it comes from.
        reason: Why, in words that follow a colon.
    """

    name: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        """Show name and reason."""
        return f"{self.name} ({self.distribution}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome for one kind.

    Attributes:
        kind: The kind.
        choice: What the user or the default asked for.
        chosen: Picked backends, the best first; exactly one unless a chain was asked for.
        refused: The others that were looked at, with reasons.
    """

    kind: str
    choice: str
    chosen: tuple[SelectedBackend, ...]
    refused: tuple[Refusal, ...]

    @property
    def one(self) -> SelectedBackend:
        """The picked backend of a kind that takes one."""
        assert len(self.chosen) == 1, f"{self.kind} is a chain: read .chosen"
        return self.chosen[0]

    def describe(self) -> str:
        """Say in one line what was picked and why nothing else was, for the start-up log."""
        picked = ", ".join(str(backend) for backend in self.chosen)
        return _line(self.kind, self.choice, picked, self.refused)


@dataclass(frozen=True, slots=True)
class AttentionSelection:
    """The outcome for attention.

    Attributes:
        choice: What the user or the default asked for.
        prefill: Serves prefill batches.
        decode: Serves decode batches of up to `SMALL_DECODE_REQS` requests. Where backends have
            the same ``key``, one object is to be built.
        large_decode: Serves larger decode batches.
        page_size: Tokens of a KV page: the user's, or the smallest shared one of at least the
            preferred size.
        refused: The others that were looked at, with reasons.
    """

    choice: str
    prefill: SelectedBackend
    decode: SelectedBackend
    large_decode: SelectedBackend
    page_size: int
    refused: tuple[Refusal, ...]

    @property
    def has_graph_capture(self) -> bool:
        """Whether decode can run from CUDA graphs."""
        both = (self.decode, self.large_decode)
        return all(backend.capabilities.has_graph_capture for backend in both)

    @property
    def names(self) -> str:
        """What serves which part, in the spelling of ``--attn``."""
        names = [each.name for each in (self.prefill, self.decode, self.large_decode)]
        while len(names) > 1 and names[-1] == names[-2]:
            names.pop()
        return ",".join(names)

    def describe(self) -> str:
        """Say in one line what was picked and why nothing else was, for the start-up log."""
        decode = f"decode {self.decode}"
        if self.large_decode.key != self.decode.key:
            decode += f", beyond {SMALL_DECODE_REQS} requests {self.large_decode}"
        picked = f"prefill {self.prefill}, {decode}, page size {self.page_size}"
        return _line("attention", self.choice, picked, self.refused)


def _line(kind: str, choice: str, picked: str, refused: tuple[Refusal, ...]) -> str:
    others = "; ".join(str(refusal) for refusal in refused)
    return f"{kind} {choice}: {picked}" + (f"; refused: {others}" if others else "")


def import_factory(path: str) -> Callable[[Any], Any]:  # Any: as in load
    """Import ``package.module:attribute``."""
    module_name, _, attribute = path.partition(":")
    factory = getattr(import_module(module_name), attribute, None)
    if not callable(factory):
        raise PluginError(f"{path!r} is not there or cannot be called")
    checked: Callable[[Any], Any] = factory
    return checked
