"""The engine in one file says what Hugging Face says."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import TinyModel, save_tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_engine.py"
PROMPTS = [[5], [7, 300, 12, 4, 18, 90, 66], list(range(10, 40))]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:  # Any: whatever the file defines
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize(
    "spec",
    [
        TinyModel("llama", is_tied=True),
        TinyModel("qwen2"),
        TinyModel("qwen3"),
        TinyModel("mistral"),
    ],
    ids=lambda spec: spec.arch,
)
def test_its_tokens_are_those_of_hugging_face(
    example: dict[str, Any],  # Any: as above
    tmp_path: Path,
    spec: TinyModel,
) -> None:
    reference = save_tiny_model(tmp_path, spec)
    model = example["Model"](tmp_path)
    for prompt in PROMPTS:
        assert list(example["generate"](model, prompt, 16)) == greedy(reference, prompt, 16)


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_it_runs_from_the_command_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, TinyModel("llama"))
    command = [sys.executable, str(EXAMPLE), str(tmp_path), "The capital", "4"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert done.stdout.decode().startswith("The capital")


def test_it_imports_nothing_of_ours_and_stays_short() -> None:
    text = EXAMPLE.read_text()
    assert "import minisgl" not in text
    assert "from minisgl" not in text
    assert len(text.splitlines()) <= 150


def test_a_rotation_that_it_does_not_know_is_refused(
    example: dict[str, Any],  # Any: as above
    tmp_path: Path,
) -> None:
    save_tiny_model(tmp_path, TinyModel("llama", rope="yarn"))
    with pytest.raises(ValueError, match="yarn"):
        example["Model"](tmp_path)
