"""Throw-away distributions with hook plugins."""

from __future__ import annotations

from tests.core.plugin.throwaway import Throwaway

HOOK = """
    from minisgl.plugin.commands import Subcommand
    from minisgl.plugin.hookspecs import hookimpl
"""

BAD_HOOKS = Throwaway(
    "acme-bad-hooks",
    {
        "acme_unknown_hook.py": HOOK
        + """
    @hookimpl
    def minisgl_subcommands():
        return [Subcommand("left-behind", "must not be there", "no:no")]

    @hookimpl
    def minisgl_steps_finished(step):
        pass
    """,
        "acme_wrong_argument.py": HOOK
        + """
    @hookimpl
    def minisgl_step_finished(record):
        pass
    """,
        "acme_wrapper.py": HOOK
        + """
    @hookimpl(wrapper=True)
    def minisgl_subcommands():
        return (yield)
    """,
        "acme_unmarked.py": HOOK
        + """
    def minisgl_step_finished(step):
        pass
    """,
        "acme_takes_a_name.py": HOOK
        + """
    @hookimpl
    def minisgl_subcommands():
        return [Subcommand("fine", "", "no:no"), Subcommand("plugins", "is taken", "no:no")]
    """,
        "acme_raises_when_called.py": HOOK
        + """
    @hookimpl
    def minisgl_subcommands():
        raise LookupError("no commands today")

    @hookimpl
    def minisgl_step_finished(step):
        raise AssertionError("must have been dropped")
    """,
        "acme_boots_when_called.py": HOOK
        + """
    from minisgl.plugin.manager import PluginManager

    COUNT = 0

    @hookimpl
    def minisgl_subcommands():
        global COUNT
        COUNT += 1
        PluginManager.bootstrap()
        return []
    """,
        "acme_boots_at_import.py": """
    from minisgl.plugin.manager import PluginManager

    PluginManager.bootstrap()
    """,
        "acme_no_hooks.py": "",
    },
    {
        "minisgl": {
            "unknown-hook": "acme_unknown_hook",
            "wrong-argument": "acme_wrong_argument",
            "wrapper": "acme_wrapper",
            "unmarked": "acme_unmarked",
            "takes-a-name": "acme_takes_a_name",
            "raises-when-called": "acme_raises_when_called",
            "boots-when-called": "acme_boots_when_called",
            "boots-at-import": "acme_boots_at_import",
            "no-hooks": "acme_no_hooks",
        }
    },
)

BAD_COMMANDS = Throwaway(
    "acme-bad-commands",
    {
        "acme_bad_commands.py": HOOK
        + """
    def raises(parser):
        raise RuntimeError("no flags today")

    def clash(parser):
        parser.add_argument("--json")
        parser.add_argument("--json")

    def taken(parser):
        parser.add_argument("--model")

    def run(context):
        raise RuntimeError("run failed")

    def leave(context):
        pass

    def complete(words, given, tree):
        raise RuntimeError("no settings today")

    @hookimpl
    def minisgl_subcommands():
        run, leave = "acme_bad_commands:run", "acme_bad_commands:leave"
        complete = "acme_bad_commands:complete"
        return [
            Subcommand("no-flags", "", leave, add_arguments=raises),
            Subcommand("clash", "", leave, add_arguments=clash),
            Subcommand("taken", "", leave, has_settings=True, add_arguments=taken),
            Subcommand("gone", "", "acme_bad_commands:gone"),
            Subcommand("broken", "", "acme_nowhere:run"),
            Subcommand("raises", "", run),
            Subcommand("leaves", "", leave),
            Subcommand("completes", "", leave, has_settings=True, complete_settings=complete),
        ]
    """,
    },
    {"minisgl": {"bad-commands": "acme_bad_commands"}},
)

SERVER = Throwaway(
    "acme-server",
    {
        "acme_server.py": """
    from pydantic import Field
    from minisgl.config.fields import SettingsSection
    from minisgl.plugin.commands import Subcommand
    from minisgl.plugin.hookspecs import hookimpl

    class ServerSettings(SettingsSection):
        '''Where it listens.'''
        host: str = Field("127.0.0.1", description="Address. Read by the server.")
        port: int = Field(1919, ge=0, le=65535, description="Port. Read by the server.")
        origins: tuple[str, ...] = Field((), description="Origins. Read by the server.")

    @hookimpl
    def minisgl_subcommands():
        return [
            Subcommand(
                "serve",
                "serve a model",
                "acme_server:run",
                has_settings=True,
                has_model_argument=True,
                sections=(ServerSettings,),
            )
        ]

    def run(context):
        server = context.filled_settings.section(ServerSettings)
        model = context.filled_settings.model.model
        print(model, server.host, server.port, *server.origins)
        return 0
    """
    },
    {"minisgl": {"server": "acme_server"}},
)

HOOK_SAMPLES = (BAD_HOOKS, BAD_COMMANDS, SERVER)
