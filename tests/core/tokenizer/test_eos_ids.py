from __future__ import annotations

from typing import Any

import pytest

from minisgl.errors import ModelError
from minisgl.tokenizer.eos import eos_token_ids
from minisgl.weights.contract import ModelFiles, WeightReader
from tests.tiny_models import build_tokenizer


class FakeFiles(ModelFiles):
    """Only the two JSON files."""

    def __init__(self, config: Any, generation: Any) -> None:
        self.name = "fake"
        self.config = {"eos_token_id": config} if config != "absent" else {}
        self.generation_config = {"eos_token_id": generation} if generation != "absent" else {}

    def open_weights(self) -> WeightReader:
        raise NotImplementedError

    def load_tokenizer(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, [8, 9], {2, 7, 8, 9}),
        ("absent", "absent", {2}),
        (None, None, {2}),
        ([2], 2, {2}),
        (-1, [5, -1], {2, 5}),
    ],
)
def test_the_ids_of_all_three_sources_count(
    config: Any, generation: Any, expected: set[int]
) -> None:
    assert eos_token_ids(FakeFiles(config, generation), build_tokenizer()) == expected


def test_a_model_without_a_tokenizer_has_the_ids_of_its_files() -> None:
    assert eos_token_ids(FakeFiles(7, 8)) == {7, 8}


@pytest.mark.parametrize("value", ["</s>", [1, "x"], True, 1.5, {}])
def test_what_is_no_token_id_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id .* token ids"):
        eos_token_ids(FakeFiles(1, value))
