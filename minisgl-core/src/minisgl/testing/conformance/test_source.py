"""What every model source has to do; see `minisgl.weights.contract`.

The source is asked for a sample of its own making (`ModelSource.write_sample`), for a folder in
Hugging Face layout that the suite makes, or for what ``--source-model`` names.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from minisgl.errors import MinisglError, ModelError
from minisgl.models.read import read_model_config
from minisgl.plugin.manager import PluginManager
from minisgl.testing.selection import TestedBackend
from minisgl.testing.source_case import (
    Sample,
    SourceCase,
    complaint,
    fingerprint,
    read_all,
)

NO_MODELS = (
    "",
    " ",
    "/no/such/folder/at/all",
    "no such model, with blanks",
    "a\nb",
    "x" * 300,
    "~no-such-user/model",
    "nul\0byte",
)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def case(
    backend: TestedBackend,
    tmp_path: Path,
    empty_folder: Path,
    pytestconfig: pytest.Config,
) -> SourceCase:
    folder = tmp_path / "sample"
    folder.mkdir()
    model = pytestconfig.getoption("--source-model")
    # A relative path is meant from where the user is.
    path = Path(pytestconfig.invocation_params.dir, model) if model else None
    return SourceCase(backend, folder, str(path) if path and path.exists() else model)


@pytest.fixture
def opening(case: SourceCase) -> SourceCase:
    """A source that has a sample to open."""
    if case.sample is None:
        pytest.skip("has no write_sample, does not take folders, and --source-model names none")
    return case


@pytest.mark.parametrize("model", NO_MODELS, ids=lambda model: repr(model[:12]))
def test_what_is_no_model_is_declined(case: SourceCase, model: str) -> None:
    assert case.source.accepts(model) is False, "accepts declines what no source could open"


@pytest.mark.parametrize("model", NO_MODELS, ids=lambda model: repr(model[:12]))
def test_opening_what_is_no_model_is_an_error(case: SourceCase, model: str) -> None:
    with pytest.raises(MinisglError) as caught:
        case.source.open(model)
    assert isinstance(caught.value, ModelError), "open raises ModelError"
    assert str(caught.value).strip(), "open says why"


def test_accepting_looks_at_nothing_but_the_file_system(
    case: SourceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError("accepts does no I/O beyond looking at the file system")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    sample = case.sample.model if case.sample else "owner/name"
    for model in ("owner/name", "name", "https://localhost/model", sample):
        assert isinstance(case.source.accepts(model), bool), "accepts returns a bool"


def test_its_own_sample_is_accepted(opening: SourceCase) -> None:
    assert opening.sample is not None, "opening has one"
    if opening.sample.folder is None:
        pytest.skip("an id may belong to several hubs, so a source may want to be named")
    assert opening.source.accepts(opening.sample.model) is True, (
        "accepts takes files that the source can open"
    )


def test_configurations_are_plain_json(opening: SourceCase) -> None:
    files = opening.open()
    assert isinstance(files.name, str), "name is text"
    assert files.name.strip(), "name is not empty"
    for name in ("config", "generation_config"):
        content = getattr(files, name)
        assert isinstance(content, dict), f"{name} is a dict"
        assert json.loads(json.dumps(content)) == content, f"{name} holds JSON and nothing else"


def test_the_configuration_describes_a_model(opening: SourceCase) -> None:
    config = read_model_config(opening.open().config, PluginManager.bootstrap())
    assert config.num_layers > 0, "config is what config.json would say"


def test_every_tensor_has_a_name_a_shape_and_a_place(opening: SourceCase) -> None:
    reader = opening.open().open_weights()
    names = list(reader.names())
    assert names, "names yields the tensors of the checkpoint"
    assert len(set(names)) == len(names), "names yields each tensor once"
    assert list(reader.names()) == names, "names yields the same order again"
    for name in names:
        assert all(type(size) is int for size in reader.shape(name)), "shape returns integers"
        assert reader.where(name).strip(), "where says in which file a tensor is"
    assert reader.where().strip(), "where says where the weights are"
    reader.close()


def test_a_whole_tensor_has_its_shape(opening: SourceCase) -> None:
    files = opening.open()
    tensors = read_all(files)
    reader = files.open_weights()
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == tuple(reader.shape(name)), f"{name}: shape is that of read"
        assert tensor.device.type == "cpu", "read returns a tensor on the host"
        assert tensor.float().isfinite().all(), f"{name}: read returns finite numbers"
    reader.close()


def test_a_part_is_the_part_of_the_whole(opening: SourceCase) -> None:
    files = opening.open()
    tensors = read_all(files)
    reader = files.open_weights()
    for name, whole in list(tensors.items())[:12]:
        halves = [slice(0, max(size // 2, 1)) for size in whole.shape]
        rest = [slice(size // 2, size) for size in whole.shape]
        first = [*halves[:1], *(slice(None) for _ in whole.shape[1:])]
        for index in (tuple(halves), tuple(rest), tuple(first)):
            part = reader.read(name, index)
            assert torch.equal(part, whole[index]), f"{name}: read returns the part of index alone"
    reader.close()


def test_two_readers_do_not_disturb_each_other(opening: SourceCase) -> None:
    files = opening.open()
    first, second = files.open_weights(), files.open_weights()
    name = next(iter(first.names()))
    index = tuple(slice(None) for _ in first.shape(name))
    before = second.read(name, index)
    first.close()
    assert torch.equal(second.read(name, index), before), "each reader has files of its own"
    second.close()
    second.close()


def test_opening_again_gives_the_same_model(opening: SourceCase) -> None:
    first, second = opening.open(), opening.build().open(opening.sample.model)  # type: ignore[union-attr]  # opening has one
    assert (first.name, first.config) == (second.name, second.config), "open is repeatable"
    tensors, again = read_all(first), read_all(second)
    assert tensors.keys() == again.keys(), "open is repeatable"
    assert all(torch.equal(tensors[name], again[name]) for name in tensors), "open is repeatable"


def test_the_tokenizer_reads_and_writes_text(opening: SourceCase) -> None:
    files = opening.open()
    tokenizer = files.load_tokenizer()
    text = "The capital of France is Paris."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids, "the tokenizer makes ids of text"
    vocab_size = read_model_config(files.config, PluginManager.bootstrap()).vocab_size
    assert max(ids) < vocab_size, "the tokenizer's ids are those of the model's vocabulary"
    assert str(tokenizer.decode(ids)).strip() == text, "the tokenizer makes the same text of ids"


def test_opening_writes_nothing(opening: SourceCase, empty_folder: Path) -> None:
    sample = opening.sample
    assert sample is not None, "opening has one"
    before = {} if sample.folder is None else fingerprint(sample.folder)
    files = opening.open()
    files.load_tokenizer()
    read_all(files)
    assert not list(empty_folder.iterdir()), "opening writes nothing into the working directory"
    if sample.folder is not None:
        assert fingerprint(sample.folder) == before, "opening writes nothing beside the model"


def test_a_file_that_is_cut_short_is_named(opening: SourceCase, tmp_path: Path) -> None:
    for number, path in enumerate(damageable(opening)):
        sample = opening.sample.copied(tmp_path / f"cut{number}")  # type: ignore[union-attr]  # has files
        damaged = counterpart(path, opening, sample)
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[: len(whole) // 2])
        said = complaint(opening, sample)
        is_weights = path.stat().st_size == max(p.stat().st_size for p in opening.sample.files())  # type: ignore[union-attr]  # has files
        if is_weights:
            assert said is not None, f"{path.name}: weights that are cut short are a ModelError"
        if said is not None:
            assert is_named(path, said), f"{path.name}: the error names the damaged file: {said}"


def test_a_file_that_is_missing_is_named(opening: SourceCase, tmp_path: Path) -> None:
    for number, path in enumerate(damageable(opening)):
        sample = opening.sample.copied(tmp_path / f"gone{number}")  # type: ignore[union-attr]  # has files
        counterpart(path, opening, sample).unlink()
        said = complaint(opening, sample)
        if said is not None:
            assert is_named(path, said), (
                f"{path.name}: the error names what is missing, or where it was looked for: {said}"
            )


def damageable(case: SourceCase) -> list[Path]:
    """Return the sample's files, or skip where they are not known."""
    files = case.sample.files() if case.sample else []
    if not files:
        pytest.skip("the sample's files are not known")
    return files


def counterpart(path: Path, case: SourceCase, copy: Sample) -> Path:
    """Return the file of a copy that stands for one of the sample."""
    assert case.sample is not None, "the sample has files"
    assert case.sample.folder is not None, "the sample has files"
    assert copy.folder is not None, "a copy has a folder"
    return copy.folder / path.relative_to(case.sample.folder)


def is_named(path: Path, message: str) -> bool:
    """Whether a message names a file, or the folder that it should be in."""
    return path.name in message or path.parent.name in message
