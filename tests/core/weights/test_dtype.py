from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.errors import ModelError, SettingsError
from minisgl.weights.dtype import resolve_dtype


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_auto_takes_the_dtype_of_the_checkpoint(
    config: dict[str, Any], expected: torch.dtype
) -> None:
    assert resolve_dtype(config) == expected


def test_auto_without_a_stored_dtype_depends_on_the_device() -> None:
    assert resolve_dtype({}, device_type="cpu") == torch.float32
    assert resolve_dtype({}, device_type="cuda") == torch.bfloat16


@pytest.mark.parametrize("requested", ["float16", "half", torch.float16, "torch.float16"])
def test_a_requested_dtype_wins(requested: str | torch.dtype) -> None:
    assert resolve_dtype({"dtype": "bfloat16"}, requested) == torch.float16


def test_a_dtype_that_is_not_computed_in_is_refused() -> None:
    with pytest.raises(SettingsError, match="--dtype int8: must be auto, float32, float16"):
        resolve_dtype({}, "int8")
    with pytest.raises(ModelError, match=r"config\.json: dtype 'float8' cannot be computed in"):
        resolve_dtype({"dtype": "float8"})
