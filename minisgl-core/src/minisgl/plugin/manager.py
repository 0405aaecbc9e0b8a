"""The plugins of one process: discovery, hooks, settings sections and resolution in one place."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from minisgl.config.load import Settings, load_keywords
from minisgl.config.tree import Section, SettingsTree
from minisgl.errors import PluginError
from minisgl.plugin.commands import Subcommand
from minisgl.plugin.discovery import Catalog, Offer, discover
from minisgl.plugin.hook_plugins import HookPlugins
from minisgl.plugin.hooks import subcommands
from minisgl.plugin.isolation import Failure
from minisgl.plugin.lookup import Lookup, Request
from minisgl.plugin.resolve import Resolver
from minisgl.plugin.sections import plugin_sections
from minisgl.plugin.selection import AttentionSelection, Selection
from minisgl.plugin.spec import ProbeContext
from minisgl.plugin.specs import SpecStore, check_defaults

# Not a flag that plugins are loaded, which a fork would inherit: it is set during `bootstrap`
# alone, so that a plugin that calls it again fails at once and does not go round for ever.
_IS_LOADING: ContextVar[bool] = ContextVar("minisgl_is_loading_plugins", default=False)


class PluginManager:
    """What is installed and takes part; made by `bootstrap`, owned by whoever called it.

    Nothing is kept in modules: a second manager in one process, or one in a forked or spawned
    process, starts from the metadata again and registers every hook once.

    Attributes:
        catalog: What is installed.
        specs: Specs loaded so far.
        hooks: The hook plugins; pass it to the functions of `minisgl.plugin.hooks`.
        commands: Subcommands by name.
        owners: The hook plugin of each subcommand.
    """

    def __init__(self, catalog: Catalog) -> None:
        """Load the hook plugins of a catalog."""
        self.catalog = catalog
        self.specs = SpecStore()
        self.hooks = HookPlugins()
        self.hooks.load(catalog.hooks)
        self.commands: dict[str, Subcommand] = {}
        self.owners: dict[str, Offer] = {}
        self._command_sections: list[Section] = []
        subcommands(self.hooks, self._add_commands)
        self._lookup = Lookup(catalog, self.specs)
        self._resolver = Resolver(self._lookup)

    @classmethod
    def bootstrap(cls, env: Mapping[str, str] | None = None) -> PluginManager:
        """Discover and load; every process calls this first, spawned workers too.

        Args:
            env: The environment, for ``MINISGL_PLUGINS``; default ``os.environ``.

        Raises:
            PluginError: ``MINISGL_PLUGINS`` names something that is not installed, or a plugin
                that is being loaded called this. Plugins that do not load are no error here: see
                `failures`.
        """
        if _IS_LOADING.get():
            raise PluginError("bootstrap was called by a plugin while plugins are being loaded")
        environment = os.environ if env is None else env
        token = _IS_LOADING.set(True)
        try:
            return cls(discover(environment.get("MINISGL_PLUGINS", "")))
        finally:
            _IS_LOADING.reset(token)

    def settings_tree(self) -> SettingsTree:
        """Return every setting of the core, of commands and of backends that load.

        A backend whose settings take the name of others counts as broken from then on.
        """
        offers = {offer.key: offer for offer in self.catalog.offers}
        sections = list(self._command_sections)
        for section in plugin_sections(self.specs.loadable(self.catalog.offers)):
            try:
                SettingsTree.build([*sections, section])
            except PluginError as error:
                for owner in section.owners:
                    self.specs.refuse(offers[owner], error)
            else:
                sections.append(section)
        return SettingsTree.build(sections)

    def load_settings(
        self, keywords: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> Settings:
        """Fill the tree from Python keywords over the environment.

        Args:
            keywords: Names as in `Option.keywords`; ``None`` counts as not given; ``config`` is a
                file.
            env: Default ``os.environ``.

        Raises:
            SettingsError: A name is unknown or a value is not allowed.
        """
        environment = os.environ if env is None else env
        return load_keywords(self.settings_tree(), keywords, env=environment)

    def names(self, kind: str) -> list[str]:
        """Return the names that are installed for a kind, sorted; nothing is imported."""
        return sorted({offer.name for offer in self.catalog.offers if offer.kind == kind})

    def check_names(self, kind: str, choice: str) -> None:
        """Refuse names of backends that are not installed, or are ambiguous.

        For whoever must know early: probes are not asked, so it needs neither machine nor model.

        Args:
            kind: A kind.
            choice: As for `resolve`, or several by commas where the kind takes them.

        Raises:
            PluginError: A name is unknown or ambiguous; the message starts with the flag.
        """
        self._lookup.check_names(Request(kind, choice, ProbeContext(), is_dry=True))

    def resolve(
        self, kind: str, choice: str, context: ProbeContext, *, is_dry: bool = False
    ) -> Selection:
        """Pick one backend; the result's ``one``.

        Args:
            kind: A kind that takes one name: cache, moe, comm, policy, source, model.
            choice: A name, an alias, ``distribution:name``, or ``auto`` for what works here with
                the highest priority.
            context: Machine and model that probes are asked about.
            is_dry: Import no factory. Otherwise ``auto`` passes over, with a warning, what cannot
                be imported.

        Raises:
            PluginError: The name is unknown, ambiguous, broken, for another plugin API, or does
                not work here; nothing else is ever used in place of a name. Or ``auto`` found
                nothing. The message starts with the flag.
        """
        return self._resolver.single(Request(kind, choice, context, is_dry))

    def resolve_chain(
        self, kind: str, choice: str, context: ProbeContext, *, is_dry: bool = False
    ) -> Selection:
        """Pick several backends in order; the result's ``chosen``, at least one.

        Args:
            kind: ``"kernels"``, or ``"source"`` to ask each in turn.
            choice: Names by commas; ``auto``, alone or among them, stands for all that work here,
                by falling priority.
            context: As for `resolve`.
            is_dry: As for `resolve`.

        Raises:
            PluginError: As for `resolve`.
        """
        return self._resolver.chain(Request(kind, choice, context, is_dry))

    def resolve_attention(
        self,
        choice: str,
        context: ProbeContext,
        *,
        preferred_page_size: int = 1,
        is_dry: bool = False,
    ) -> AttentionSelection:
        """Pick the attention backends of both phases, and a page size that suits them.

        Args:
            choice: One name for all, or ``PREFILL,DECODE``, or ``PREFILL,DECODE,LARGE_DECODE``,
                the last for decode batches of more than `SMALL_DECODE_REQS` requests; each may be
                ``auto``.
            context: As for `resolve`; ``page_size`` is the user's, or ``None`` to have the
                smallest shared size of at least ``preferred_page_size`` tokens picked.
            preferred_page_size: In tokens.
            is_dry: As for `resolve`.

        Raises:
            PluginError: As for `resolve`, or the two share no page size; the message says which
                backend wants what.
        """
        request = Request("attention", choice, context, is_dry)
        return self._resolver.attention(request, preferred_page_size)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Everything that has failed to load so far."""
        return (*self.catalog.failures, *self.hooks.failures, *self.specs.failures)

    def _add_commands(self, offer: Offer, commands: tuple[Subcommand, ...]) -> None:
        """Add a plugin's commands and their sections, all or none."""
        sections = [Section(s, commands=(c.name,)) for c in commands for s in c.sections]
        names = Counter(command.name for command in commands)
        for name, count in names.items():
            if count > 1:
                raise PluginError(f"it offers {count} subcommands {name!r}")
            if name in self.commands:
                raise PluginError(
                    f"the subcommand {name!r} is taken, by {self.owners[name].distribution}"
                )
        for section in sections:
            check_defaults(section.model)
        SettingsTree.build([*self._command_sections, *sections])
        self._command_sections += sections
        self.commands.update({command.name: command for command in commands})
        self.owners.update(dict.fromkeys(names, offer))
