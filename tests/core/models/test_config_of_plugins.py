"""A config.json whose architecture another distribution offers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from minisgl.errors import ModelError
from minisgl.models.read import read_model_config
from minisgl.plugin.discovery import Catalog, Offer
from minisgl.plugin.manager import PluginManager

CONFIG = {
    "architectures": ["AdaptedForCausalLM"],
    "width": 64,
    "hidden_size": 8,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}

MODULE = """
from minisgl.errors import ModelError
from minisgl.plugin.spec import PLUGIN_API, BackendSpec

def adapt(config):
    if config["width"] == 0:
        raise ModelError("config.json: width 0 is not supported")
    return {**config, "hidden_size": config["width"], "use_qk_norm": True,
            "use_sliding_window": True, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"]}

ADAPTED = BackendSpec(PLUGIN_API, "nowhere:Model", adapt_config=adapt)
PLAIN = BackendSpec(PLUGIN_API, "nowhere:Model")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with specs, importable for the length of a test."""
    (tmp_path / "adapting_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "adapting_plugin"
    sys.modules.pop("adapting_plugin", None)


def plugins_with(*values: str) -> PluginManager:
    """Know one distribution per value, each with a spec of the same architecture."""
    offers = tuple(
        Offer(
            "model",
            "AdaptedForCausalLM",
            f"acme-{number}",
            "1.0",
            EntryPoint("AdaptedForCausalLM", value, "minisgl.model"),
        )
        for number, value in enumerate(values)
    )
    return PluginManager(Catalog(offers, (), {}, frozenset(), ()))


def test_the_backend_of_the_architecture_reads_it_first(module: str) -> None:
    config = read_model_config(CONFIG, plugins_with(f"{module}:ADAPTED"))
    assert config.hidden_size == 64
    assert config.has_qk_norm
    assert config.windows == (8, None)
    assert config.raw["width"] == 64


def test_without_an_adapter_the_common_fields_count(module: str) -> None:
    config = read_model_config(CONFIG | {"use_qk_norm": True}, plugins_with(f"{module}:PLAIN"))
    assert (config.hidden_size, config.has_qk_norm, config.windows) == (8, True, (None, None))


def test_what_the_adapter_refuses_is_said_as_it_says_it(module: str) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: width 0 is not supported$"):
        read_model_config(CONFIG | {"width": 0}, plugins_with(f"{module}:ADAPTED"))


def test_an_adapter_that_fails_is_named(module: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "width"}
    with pytest.raises(ModelError, match="AdaptedForCausalLM cannot read it: KeyError: 'width'"):
        read_model_config(config, plugins_with(f"{module}:ADAPTED"))


@pytest.mark.parametrize("second", ["adapting_plugin:PLAIN", "adapting_plugin:gone"])
def test_two_offers_or_a_broken_one_are_left_to_whoever_picks(module: str, second: str) -> None:
    first = [] if second.endswith("gone") else [f"{module}:ADAPTED"]
    assert read_model_config(CONFIG, plugins_with(*first, second)).hidden_size == 8
