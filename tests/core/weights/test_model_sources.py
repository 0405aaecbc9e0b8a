from __future__ import annotations

import logging
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from minisgl.errors import ModelError
from minisgl.plugin.manager import PluginManager
from minisgl.weights.contract import ModelFiles, ModelSource, SourceConfig
from minisgl.weights.demo import DemoSource
from minisgl.weights.gguf import GGUFSource
from minisgl.weights.hub import HubSource
from minisgl.weights.local import LocalSource
from minisgl.weights.modelscope import ModelScopeSource
from minisgl.weights.resolve import open_configured, open_model
from tests.tiny_models import TinyModel, build_tokenizer, save_tiny_model

CONFIG = SourceConfig()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model(folder, TinyModel(), max_shard_size="40KB")
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


# a folder


def test_a_folder_opens_with_configuration_weights_and_tokenizer(model_folder: Path) -> None:
    files = LocalSource(CONFIG).open(str(model_folder))
    assert files.name == "tiny-llama"
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.generation_config["eos_token_id"] == [2, 4]
    assert "model.norm.weight" in set(files.open_weights().names())
    assert files.load_tokenizer().encode("Paris") == build_tokenizer().encode("Paris")


def test_a_folder_without_generation_config_or_template_needs_no_network(tmp_path: Path) -> None:
    build_tokenizer(chat_template=None).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    files = LocalSource(CONFIG).open(str(tmp_path))
    assert files.generation_config == {}
    assert files.load_tokenizer().chat_template is None


def test_shards_are_taken_where_both_formats_are_there(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in model_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not even a weight file")
    with caplog.at_level(logging.INFO):
        reader = LocalSource(CONFIG).open(str(tmp_path)).open_weights()
    assert "model.norm.weight" in set(reader.names())
    assert "the Hugging Face shards are loaded and consolidated.safetensors is not" in caplog.text


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("consolidated.safetensors", "only Mistral's consolidated format"),
        ("pytorch_model.bin", "only pickled weights"),
        ("weights.gguf", "but weights.gguf; name that file"),
        ("notes.txt", "holds no model.safetensors and no model.safetensors.index.json$"),
    ],
)
def test_a_folder_with_other_weights_says_what_it_holds(
    tmp_path: Path, file: str, message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ModelError, match=message):
        LocalSource(CONFIG).open(str(tmp_path)).open_weights()


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no config.json"):
        LocalSource(CONFIG).open(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: (cannot be read as|is not a) JSON"):
        LocalSource(CONFIG).open(str(tmp_path))


def test_a_missing_or_damaged_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="holds no tokenizer"):
        LocalSource(CONFIG).open(str(tmp_path)).load_tokenizer()
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        LocalSource(CONFIG).open(str(tmp_path)).load_tokenizer()


# the hubs


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_hub_accepts_ids(model: str) -> None:
    assert HubSource(CONFIG).accepts(model)


@pytest.mark.parametrize(
    "model",
    ["Qwen3-0.6B", "./Qwen/Qwen3", "/models/Qwen3", "~/Qwen3", "../a/b", "a/b/c", "models/",
     "C:\\models", "", "a b/c"],
)  # fmt: skip
def test_the_hub_does_not_accept_what_looks_like_a_path(model: str) -> None:
    assert not HubSource(CONFIG).accepts(model)


def test_the_hub_does_not_accept_a_misspelt_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not HubSource(CONFIG).accepts("models/Qwen3-0.6")


def test_the_hub_opens_the_folder_that_it_fetched(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fetch(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(model_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    files = HubSource(SourceConfig(revision="v2")).open("owner/tiny")
    assert files.name == "owner/tiny"
    assert (asked["repo_id"], asked["revision"]) == ("owner/tiny", "v2")
    assert "*.bin" not in asked["allow_patterns"]
    assert "consolidated*" in asked["ignore_patterns"]


def test_an_unreachable_hub_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repo_id: str, **options: object) -> str:
        raise LocalEntryNotFoundError("long technical text")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match="--model a/b: .* cannot be reached and there is no local"):
        HubSource(CONFIG).open("a/b")


def test_modelscope_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelError, match=r"pip install 'minisgl-core\[modelscope\]'"):
        ModelScopeSource(CONFIG).open("owner/tiny")


def test_modelscope_opens_the_folder_that_it_fetched(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType("modelscope")
    fake.snapshot_download = lambda model, **options: str(model_folder)  # type: ignore[attr-defined]  # a fake
    monkeypatch.setitem(sys.modules, "modelscope", fake)
    assert ModelScopeSource(CONFIG).open("owner/tiny").config["model_type"] == "llama"


# all together


@dataclass
class FakeBackend:
    """Stands in for `SelectedBackend`."""

    name: str
    source: type[ModelSource]
    key: str = "source/minisgl-core:x"

    def build(self, config: SourceConfig, contract: type) -> ModelSource:
        return self.source(config)  # type: ignore[call-arg]  # every source takes its configuration


@dataclass
class FakeSelection:
    """Stands in for `Selection`."""

    chosen: tuple[FakeBackend, ...]


class FakeManager:
    """Resolves sources by name, in the core's order."""

    sources = (
        FakeBackend("demo", DemoSource),
        FakeBackend("gguf", GGUFSource),
        FakeBackend("hub", HubSource),
        FakeBackend("local", LocalSource),
        FakeBackend("modelscope", ModelScopeSource),
    )

    def resolve_chain(self, kind: str, choice: str, context: object) -> FakeSelection:
        assert kind == "source"
        names = choice.split(",")
        return FakeSelection(tuple(s for s in self.sources if choice == "auto" or s.name in names))


def open_by(model: str, source: str = "auto") -> ModelFiles:
    return open_model(model, source, FakeManager())  # type: ignore[arg-type]  # a fake


def test_settings_say_which_revision_is_opened(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revisions: list[str] = []

    def fetch(repo_id: str, *, revision: str, **options: Any) -> str:
        revisions.append(revision)
        return str(model_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    manager = PluginManager.bootstrap(env={})
    named = {"model": "owner/tiny", "model_source": "hub", "revision": "v2"}
    assert open_configured(manager.load_settings(named, env={}), manager).name == "owner/tiny"
    assert revisions == ["v2"]


def test_a_folder_is_found_by_auto(model_folder: Path) -> None:
    assert open_by(str(model_folder)).name == "tiny-llama"


def test_a_relative_folder_is_found_though_it_looks_like_an_id(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder.parent.parent)
    assert open_by(f"{model_folder.parent.name}/tiny-llama").name == "tiny-llama"


def test_a_misspelt_folder_is_an_error_with_a_guess_and_no_download(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder.parent.parent)
    wrong = f"{model_folder.parent.name}/tiny-lama"
    with pytest.raises(ModelError, match="there is no folder /.*tiny-lama; did you mean .*llama"):
        open_by(wrong)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./none", "nothing"])
def test_a_missing_path_is_an_error_that_says_where_it_was_looked_for(model: str) -> None:
    with pytest.raises(ModelError, match=f"--model {model}: there is no folder /.*; sources asked"):
        open_by(model)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file, but not a .gguf one"):
        open_by(str(tmp_path / "model.bin"))


def test_a_named_source_is_asked_whatever_the_model_looks_like() -> None:
    with pytest.raises(ModelError, match="a hub id is owner/name"):
        open_by("./none", "hub")


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ModelError, match="--model: is empty"):
        open_by("")
