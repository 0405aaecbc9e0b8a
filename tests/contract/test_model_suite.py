"""The suite of architectures catches broken models and passes one that is right."""

from __future__ import annotations

import pytest

from minisgl.models.contract import Model
from tests.contract import broken_models as broken
from tests.contract.suite_runs import path_of, run_suites

FAULTS: list[tuple[type[Model], str]] = [
    (broken.UsesAnotherScale, "logits are those of transformers' LlamaForCausalLM"),
    (broken.ComputesNormsWithAnotherEps, "logits are those of transformers' LlamaForCausalLM"),
    (broken.HasNoTinyConfig, "a model's factory has tiny_config()"),
    (broken.IgnoresPositions, "forward takes positions from batch.positions"),
    (broken.LeavesOutANorm, "load_targets fills all of the parameter of shape [64]"),
    (broken.LoadsTheGateTwice, "no two load targets fill the parameter"),
    (broken.ReturnsEveryRow, "one row for each entry of batch.sample_rows"),
    (broken.ReturnsFloat32, "logits are of build.dtype"),
    (broken.MixesTheBatch, "a request's logits are those that it has alone"),
    (broken.WritesIntoTheBatch, "forward does not change batch.input_ids"),
    (broken.KeepsTheFirstBatch, "give the logits of the whole prompt"),
    (broken.ForgetsToSumOverRanks, "of two returns the logits of the whole model"),
    (broken.NeverTiesTheHead, "means one table of the vocabulary"),
    (broken.KnowsFewPositions, "out of"),
    (broken.StoresKeysOneSlotTooFar, "in batch.out_loc"),
    (broken.CountsOneLayerTooMany, "layers_attention names every layer"),
]
RIGHT: list[type[Model]] = [broken.BrokenLlama, broken.PosesAsLlama]


def name_of(model: type[Model]) -> str:
    return f"model:{path_of(model)}"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the suite says about each model."""
    models = [*(fault for fault, _ in FAULTS), *RIGHT]
    return run_suites(tmp_path_factory.mktemp("models"), map(name_of, models))


@pytest.mark.parametrize(
    ("model", "sentence"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_suite_names_the_rule_that_a_broken_model_breaks(
    failures: dict[str, list[str]], model: type[Model], sentence: str
) -> None:
    found = failures[name_of(model)]
    assert any(sentence in failure for failure in found), found


@pytest.mark.parametrize("model", RIGHT, ids=lambda model: model.__name__)
def test_the_suite_passes_models_that_are_right(
    failures: dict[str, list[str]], model: type[Model]
) -> None:
    assert failures[name_of(model)] == []
