"""Real distributions that exist for the tests only: built as wheels and installed by pip."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent


@dataclass(frozen=True)
class Throwaway:
    """One distribution: modules by file name, entry points by group."""

    name: str
    modules: dict[str, str]
    entry_points: dict[str, dict[str, str]]
    version: str = "1.0"
    removed: tuple[str, ...] = field(default=())  # files that go missing after installation

    def install(self, folder: Path) -> Path:
        """Build a wheel, let pip install it into a folder of its own, and return that."""
        site = folder / self.name
        wheel = self._wheel(folder)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        options = ["--no-deps", "--no-index", "--no-compile", "--target", str(site)]
        subprocess.run([*pip, *options, str(wheel)], check=True)
        for name in self.removed:
            (site / name).unlink()
        return site

    def _wheel(self, folder: Path) -> Path:
        stem = f"{self.name.replace('-', '_')}-{self.version}"
        info = f"{stem}.dist-info"
        points = "\n".join(
            f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in names.items())
            for group, names in self.entry_points.items()
        )
        files = {name: dedent(text) for name, text in self.modules.items()}
        metadata = f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n"
        tag = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        files |= {f"{info}/METADATA": metadata, f"{info}/WHEEL": tag}
        files |= {f"{info}/entry_points.txt": points + "\n"}
        record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        wheel = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in {**files, f"{info}/RECORD": record}.items():
                archive.writestr(name, text)
        return wheel


SPEC = """
    from minisgl.plugin.spec import Availability, BackendSpec, Capabilities, PLUGIN_API
"""

GOOD = Throwaway(
    "acme-good",
    {
        "acme_good.py": SPEC
        + """
    from typing import Annotated
    from pydantic import Field
    from minisgl.config.fields import SettingsSection

    class GoodSettings(SettingsSection):
        '''How good attends.'''
        num_splits: int = Field(0, ge=0, le=8, description="Parts. Read by good.")

    ATTENTION = BackendSpec(
        api=PLUGIN_API,
        factory="acme_good_backend:build",
        summary="good at everything",
        aliases=("goodie",),
        settings=GoodSettings,
        probe=lambda context: Availability(True, "of course", priority=7),
        capabilities=Capabilities(page_sizes=(16, 64)),
    )
    """,
        "acme_good_backend.py": """
    def build(config):
        return ("built", config)
    """,
        "acme_good_hooks.py": """
    from minisgl.plugin.commands import Subcommand
    from minisgl.plugin.hookspecs import hookimpl

    SEEN = []

    @hookimpl
    def minisgl_subcommands():
        SEEN.append("subcommands")
        return [Subcommand("hello", "say hello", "acme_good_hooks:hello")]

    @hookimpl
    def minisgl_step_finished(step):
        SEEN.append(step)

    @hookimpl
    def minisgl_engine_ready():
        SEEN.append("ready")

    def hello(context):
        return 7
    """,
    },
    {
        "minisgl": {"good": "acme_good_hooks"},
        "minisgl.attention": {"good": "acme_good:ATTENTION"},
    },
)

RAISES = Throwaway(
    "acme-raises",
    {"acme_raises.py": "raise RuntimeError('the library\\nis broken')"},
    {
        "minisgl": {"raises": "acme_raises"},
        "minisgl.attention": {"raises": "acme_raises:ATTENTION"},
    },
)

EXITS = Throwaway(
    "acme-exits",
    {"acme_exits.py": "import sys; sys.exit(3)"},
    {"minisgl": {"exits": "acme_exits"}, "minisgl.attention": {"exits": "acme_exits:ATTENTION"}},
)

FUTURE = Throwaway(
    "acme-future",
    {
        "acme_future.py": SPEC
        + """
    ATTENTION = BackendSpec(api=PLUGIN_API + 1, factory="acme_future:no")
    """
    },
    {"minisgl.attention": {"future": "acme_future:ATTENTION"}},
)

STALE = Throwaway(
    "acme-stale",
    {"acme_stale.py": ""},
    {"minisgl": {"stale": "acme_stale"}, "minisgl.attention": {"stale": "acme_stale:ATTENTION"}},
    removed=("acme_stale.py",),
)

RENAMED = Throwaway(
    "acme-renamed",
    {"acme_renamed.py": "NEW_NAME = 1"},
    {"minisgl.attention": {"renamed": "acme_renamed:OLD_NAME"}},
)

NOT_A_SPEC = Throwaway(
    "acme-not-a-spec",
    {"acme_not_a_spec.py": "ATTENTION = {'api': 1}"},
    {"minisgl.attention": {"dict": "acme_not_a_spec:ATTENTION"}},
)


def _twin(letter: str, page_size: int) -> Throwaway:
    module = f"acme_twin_{letter}"
    text = f"""
    ATTENTION = BackendSpec(
        api=PLUGIN_API,
        factory="{module}:build",
        capabilities=Capabilities(page_sizes=({page_size},)),
    )

    def build(config):
        return "{letter}"
    """
    return Throwaway(
        f"acme-twin-{letter}",
        {f"{module}.py": SPEC + text},
        {"minisgl.attention": {"twin": f"{module}:ATTENTION"}},
    )


TWIN_A = _twin("a", 32)
TWIN_B = _twin("b", 48)

BROKEN_FACTORY = Throwaway(
    "acme-broken-factory",
    {
        "acme_broken_factory.py": SPEC
        + """
    ATTENTION = BackendSpec(
        api=PLUGIN_API,
        factory="acme_broken_backend:build",
        probe=lambda context: Availability(True, priority=99),
    )
    """,
        "acme_broken_backend.py": "raise OSError('libcudart.so.12: cannot open shared object file')",
    },
    {"minisgl.attention": {"broken": "acme_broken_factory:ATTENTION"}},
)

BAD_PROBE = Throwaway(
    "acme-bad-probe",
    {
        "acme_bad_probe.py": SPEC
        + """
    def explode(context):
        raise ZeroDivisionError("half a GPU")

    RAISES = BackendSpec(api=PLUGIN_API, factory="no:no", probe=explode)
    SAYS_NO = BackendSpec(
        api=PLUGIN_API, factory="no:no", probe=lambda context: Availability(False, "needs a moon")
    )
    """,
    },
    {"minisgl.cache": {"says-no": "acme_bad_probe:SAYS_NO", "explodes": "acme_bad_probe:RAISES"}},
)

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

KINDRED = Throwaway(
    "acme-kindred",
    {
        "acme_kindred.py": SPEC
        + """
    from pydantic import Field
    from minisgl.config.fields import SettingsSection

    class Shared(SettingsSection):
        '''Read by two backends.'''
        size: int = Field(1, ge=1, le=8, description="Size. Read by both.")

    class Other(SettingsSection):
        '''Read by one.'''
        size: int = Field(2, ge=1, le=8, description="Size. Read by it.")

    def make(settings):
        return BackendSpec(api=PLUGIN_API, factory="no:no", settings=settings)

    SHARED, OTHER = make(Shared), make(Other)
    """
    },
    {
        "minisgl.moe": {"both": "acme_kindred:SHARED", "clash": "acme_kindred:SHARED"},
        "minisgl.comm": {"both": "acme_kindred:SHARED", "clash": "acme_kindred:OTHER"},
        "minisgl.policy": {"cache": "acme_kindred:OTHER"},
    },
)

THROWAWAYS = {
    each.name: each
    for each in (
        GOOD,
        RAISES,
        EXITS,
        FUTURE,
        STALE,
        RENAMED,
        NOT_A_SPEC,
        TWIN_A,
        TWIN_B,
        BROKEN_FACTORY,
        BAD_PROBE,
        BAD_HOOKS,
        SERVER,
        KINDRED,
    )
}
