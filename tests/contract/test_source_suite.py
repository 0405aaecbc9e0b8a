"""The suite of model sources catches broken ones and passes ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.testing.source_case import write_tiny_model
from minisgl.weights.contract import ModelSource
from tests.contract import broken_sources as broken
from tests.contract.suite_runs import path_of, run_suite, run_suites
from tests.core.weights.gguf_writer import save_model_as_gguf
from tests.tiny_models import TinyModel, build_tiny_model, build_tokenizer

FAULTS: list[tuple[type[ModelSource], str]] = [
    (broken.AcceptsEverything, "accepts declines what no source could open"),
    (broken.AcceptsNothing, "accepts takes files that the source can open"),
    (broken.AsksTheNetwork, "accepts does no I/O beyond looking at the file system"),
    (broken.RaisesWhatComes, "FileNotFoundError"),
    (broken.NamesNoFile, "the error names"),
    (broken.FillsUpWhatIsCut, "weights that are cut short are a ModelError"),
    (broken.ReadsTooMuch, "read returns the part of index alone"),
    (broken.RepeatsATensor, "names yields each tensor once"),
    (broken.KnowsNoPlaces, "where says in which file a tensor is"),
    (broken.ClosesOnce, "closed already"),
    (broken.ReadsOneRowTooEarly, "read returns the part of index alone"),
    (broken.SharesOneReader, "the reader is closed"),
    (broken.LeavesAMarker, "opening writes nothing beside the model"),
    (broken.WritesWhereItIs, "opening writes nothing into the working directory"),
    (broken.HasNoName, "name is not empty"),
    (broken.KeepsPathsInTheConfig, "not JSON serializable"),
    (broken.LosesTheTokenizer, "ids are those of the model's vocabulary"),
]


def name_of(source: type[ModelSource]) -> str:
    return f"source:{path_of(source)}"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the suite says about each source."""
    sources: list[type[ModelSource]] = [*(fault for fault, _ in FAULTS), broken.BrokenSource]
    return run_suites(tmp_path_factory.mktemp("sources"), map(name_of, sources))


@pytest.mark.parametrize(
    ("source", "sentence"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_suite_names_the_rule_that_a_broken_source_breaks(
    failures: dict[str, list[str]], source: type[ModelSource], sentence: str
) -> None:
    found = failures[name_of(source)]
    assert any(sentence in failure for failure in found), found


def test_the_suite_passes_a_source_that_is_right(failures: dict[str, list[str]]) -> None:
    assert failures[name_of(broken.BrokenSource)] == []


def test_a_gguf_file_passes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = build_tiny_model(TinyModel(vocab_size=320))
    save_model_as_gguf(path, tmp_path / "model", model, tokenizer=build_tokenizer())
    assert run_suite(tmp_path, "source:gguf", "--source-model", str(path)) == []


@pytest.mark.slow
def test_the_demo_model_passes(tmp_path: Path) -> None:
    assert run_suite(tmp_path, "source:demo", "--source-model", "demo") == []


def test_a_model_of_the_hub_passes_from_its_cache(tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub/models--acme--tiny"
    write_tiny_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    # In a process of its own: the hub's library reads these variables when it is imported.
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    suite = ["--pyargs", "minisgl.testing", "--backend=source:hub", "--source-model=acme/tiny"]
    done = subprocess.run(
        [*command, *suite], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
