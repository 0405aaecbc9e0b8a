from __future__ import annotations

import sys

import pytest

from minisgl.errors import PluginError
from minisgl.plugin.spec import ProbeContext
from tests.core.plugin.installed import Boot, RunPython

CPU = ProbeContext()

BROKEN = ("acme-raises", "acme-exits", "acme-future", "acme-stale", "acme-renamed")


def test_reading_the_metadata_imports_no_backend(boot: Boot) -> None:
    boot("acme-good", "acme-future")
    assert "acme_good" not in sys.modules
    assert "acme_future" not in sys.modules


def test_every_installed_name_is_known(boot: Boot) -> None:
    plugins = boot("acme-good", *BROKEN)
    assert {"good", "raises", "exits", "future", "stale"} <= set(plugins.names("attention"))


def test_broken_plugins_that_nobody_asked_for_do_no_harm(boot: Boot) -> None:
    plugins = boot(*BROKEN)
    assert plugins.resolve_attention("torch", CPU, is_dry=True).prefill.name == "torch"


@pytest.mark.parametrize(
    ("distribution", "name", "reason"),
    [
        (
            "acme-raises",
            "raises",
            "RuntimeError: the library is broken; reinstall or uninstall acme-raises",
        ),
        ("acme-exits", "exits", "SystemExit: 3; reinstall or uninstall acme-exits"),
        (
            "acme-future",
            "future",
            "written for plugin api 2, and this minisgl-core has api 1; upgrade minisgl-core",
        ),
        (
            "acme-stale",
            "stale",
            "its metadata name the module 'acme_stale', which is gone; "
            "reinstall or uninstall acme-stale",
        ),
        (
            "acme-renamed",
            "renamed",
            "its metadata name 'acme_renamed:OLD_NAME', which is not there",
        ),
        ("acme-not-a-spec", "dict", "is not a BackendSpec but {'api': 1}"),
    ],
)
def test_asking_for_a_broken_backend_says_what_is_wrong(
    boot: Boot, distribution: str, name: str, reason: str
) -> None:
    plugins = boot(distribution)
    with pytest.raises(PluginError) as caught:
        plugins.resolve_attention(name, CPU)
    message = str(caught.value)
    assert message.startswith(f"--attn {name}: {name} of {distribution} 1.0: ")
    assert reason in message


def test_the_list_of_plugins_leaves_others_out(boot: Boot) -> None:
    plugins = boot("acme-good", "acme-twin-a", plugins="acme_good")
    assert "good" in plugins.names("attention")
    assert "twin" not in plugins.names("attention")
    assert "torch" in plugins.names("attention")


def test_the_list_of_plugins_blocks_one(boot: Boot) -> None:
    plugins = boot("acme-good", "acme-twin-a", plugins="-Acme.Good")
    assert "good" not in plugins.names("attention")
    assert "twin" in plugins.names("attention")
    assert plugins.catalog.blocked == {"acme-good"}
    assert "hello" not in plugins.commands


@pytest.mark.parametrize("plugins", ["acme-goof", "-acme-goof"])
def test_an_unknown_name_in_the_list_of_plugins_is_an_error(boot: Boot, plugins: str) -> None:
    with pytest.raises(PluginError, match=r"'acme-goof' offers anything; installed: .*acme-good"):
        boot("acme-good", plugins=plugins)


def test_the_core_cannot_be_left_out(boot: Boot) -> None:
    with pytest.raises(PluginError, match="minisgl-core cannot be left out"):
        boot(plugins="-minisgl-core")


def test_a_second_manager_starts_afresh_and_registers_each_hook_once(boot: Boot) -> None:
    first, second = boot("acme-good"), boot()
    hook = "minisgl_step_finished"
    for plugins in (first, second):
        assert len(plugins.hooks.implementations(hook)) == 1
        assert plugins.commands["hello"].summary == "say hello"


SPAWN = """
import json, multiprocessing
from minisgl.plugin.spec import ProbeContext

def worker(queue):
    from minisgl.errors import PluginError
    from minisgl.plugin.manager import PluginManager
    plugins = PluginManager.bootstrap()
    answers = {"hooks": len(plugins.hooks.implementations("minisgl_step_finished"))}
    for name in ("good", "raises", "exits", "future", "stale", "twin"):
        try:
            answers[name] = plugins.resolve_attention(name, ProbeContext()).prefill.build(1)[0]
        except PluginError as error:
            answers[name] = str(error)
    answers["failures"] = sorted(failure.distribution for failure in plugins.hooks.failures)
    queue.put(answers)
"""

PARENT = """
import json, multiprocessing, sys
import spawned
if __name__ == "__main__":
    results = []
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=spawned.worker, args=(queue,))
        process.start()
        results.append(queue.get(timeout=60))
        process.join()
    import queue
    mine = queue.Queue()
    spawned.worker(mine)
    results.append(mine.get())
    print(json.dumps(results))
"""


def test_spawned_and_forked_processes_discover_for_themselves(
    run_python: RunPython, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("code")
    (folder / "spawned.py").write_text(SPAWN)
    (folder / "parent.py").write_text(PARENT)
    code = f"import runpy, sys; sys.path.insert(0, {str(folder)!r})\n{PARENT}"
    names = ("acme-good", "acme-twin-a", "acme-twin-b", *BROKEN[:4])
    spawned, forked, parent = run_python(code, *names)
    assert spawned == forked == parent
    assert parent["hooks"] == 1
    assert parent["good"] == "built"
    assert parent["failures"] == ["acme-exits", "acme-raises", "acme-stale"]
    assert "acme-twin-a 1.0 and acme-twin-b 1.0 both offer 'twin'" in parent["twin"]
    assert "plugin api 2" in parent["future"]
