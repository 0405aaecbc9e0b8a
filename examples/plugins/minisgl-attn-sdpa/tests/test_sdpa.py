"""The backend against the contract, and inside an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.testing.tiny_checkpoint import write_tiny_checkpoint


def generate(folder: Path, **settings: Any) -> list[list[int]]:  # Any: settings of every type
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(str(folder), dummy_weight=True, num_pages=64, **settings) as llm:
        outputs = llm.generate(["the quick brown fox", "a", "lazy dogs " * 20], params)
    return [output["token_ids"] for output in outputs]


def test_it_conforms(tmp_path: Path) -> None:
    suite = ["--pyargs", "minisgl.testing", "--backend", "attention:sdpa"]
    command = [sys.executable, "-m", "pytest", "-q", *suite]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("max_cells", [1, 20_000])
def test_groups_of_any_size_give_what_the_reference_does(tmp_path: Path, max_cells: int) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    expected = generate(folder, attn="torch")
    assert generate(folder, attn="sdpa", sdpa={"max_group_cells": max_cells}) == expected


def test_captured_decode_steps_give_what_the_reference_does(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    expected = generate(folder, attn="torch")
    assert generate(folder, attn="sdpa", cuda_graph_max_bs=4) == expected
