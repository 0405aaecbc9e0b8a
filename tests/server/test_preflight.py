"""What is wrong with the settings and can be seen early is said before a worker starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.errors import SettingsError
from minisgl.plugin.manager import PluginManager
from minisgl.weights.hub import HubSource
from minisgl.workers.preflight import check_settings
from tests.server.server_process import ServerProcess


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.bootstrap({})


def check(manager: PluginManager, **keywords: object) -> None:
    check_settings(manager.load_settings(keywords, env={}), manager)


def test_a_model_that_is_there_passes(manager: PluginManager, tiny_model: Path) -> None:
    check(manager, model=tiny_model, attn="torch,auto", kernels="native,torch", tp=2)


def test_a_hub_id_is_not_fetched(manager: PluginManager) -> None:
    check(manager, model="owner/name", tp=3)


def test_a_source_that_fetches_is_not_asked(
    manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub takes what it is told to, even the name of a folder that is there.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.setattr(HubSource, "open", lambda self, model: pytest.fail("it was asked"))
    check(manager, model="owner/name", model_source="hub")


@pytest.mark.parametrize("kind", ["attn", "cache", "moe", "kernels", "comm", "policy"])
@pytest.mark.parametrize("name", ["nowhere", "acme:torch"])
def test_an_unknown_backend_is_refused(
    manager: PluginManager, tiny_model: Path, kind: str, name: str
) -> None:
    with pytest.raises(SettingsError, match=f"^--{kind} {name}: no installed "):
        check(manager, model=tiny_model, **{kind: name})


def test_an_unknown_source_is_refused(manager: PluginManager, tiny_model: Path) -> None:
    with pytest.raises(SettingsError, match="^--model-source nowhere: "):
        check(manager, model=tiny_model, model_source="nowhere")


@pytest.mark.parametrize("name", ["nothing", "nothing.gguf", "empty", "file"])
def test_a_model_that_is_not_there_is_refused(
    manager: PluginManager, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=str(tmp_path / name)):
        check(manager, model=tmp_path / name)


def test_heads_that_cannot_be_shared_out_are_refused(
    manager: PluginManager, tiny_model: Path
) -> None:
    with pytest.raises(SettingsError, match="^--tp 3: must divide the model's num_attention_heads"):
        check(manager, model=tiny_model, tp=3)


def test_heads_of_an_unknown_architecture_are_left_to_it(
    manager: PluginManager, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["AcmeForAll"]}))
    check(manager, model=folder, tp=3)


def test_a_trace_that_cannot_be_written_is_refused(
    manager: PluginManager, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").touch()
    for path, reason in ((tmp_path / "there", "exists"), (tmp_path / "a" / "b", "no folder")):
        with pytest.raises(SettingsError, match=f"--record {path}: .*{reason}"):
            check(manager, model=tiny_model, record=path)
    with pytest.raises(SettingsError, match="--record-prompts: goes with --record FILE"):
        check(manager, model=tiny_model, record_prompts=True)


def test_it_does_not_wait_for_torch(tiny_model: Path) -> None:
    code = (
        "import sys; from minisgl.plugin.manager import PluginManager\n"
        "from minisgl.workers.preflight import check_settings\n"
        "manager = PluginManager.bootstrap({})\n"
        "check_settings(manager.load_settings({'model': sys.argv[1]}, env={}), manager)\n"
        "print('torch' in sys.modules)\n"
    )
    run = [sys.executable, "-c", code, str(tiny_model)]
    assert subprocess.run(run, capture_output=True, check=True).stdout.strip() == b"False"


@pytest.mark.parametrize("flags", [["--attn=nowhere"], ["--num-pages=1", "--page-size=1"]])
def test_bad_input_is_exit_code_2_also_where_only_a_worker_can_see_it(
    tiny_model: Path, tmp_path: Path, flags: list[str]
) -> None:
    with ServerProcess(tiny_model, tmp_path, *flags) as server:
        assert server.wait() == 2
        assert server.log.splitlines()[-1].startswith(f"minisgl: {flags[0].replace('=', ' ')}: ")
        assert ("scheduler 0" in server.log) is (len(flags) == 2)  # only a worker counts pages
