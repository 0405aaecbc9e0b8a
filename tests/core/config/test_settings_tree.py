from __future__ import annotations

import pickle
import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Annotated, Self

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, field_validator, model_validator

from minisgl.config.fields import Setting, SettingsSection, base_type
from minisgl.config.load import Given, Settings, load_keywords, load_settings
from minisgl.config.sections import CORE_SECTIONS, EngineSettings
from minisgl.config.table import render_table
from minisgl.config.tree import Option, Section, SettingsTree
from minisgl.errors import PluginError, SettingsError
from minisgl.plugin.discovery import Offer
from minisgl.plugin.sections import plugin_sections
from minisgl.plugin.spec import PLUGIN_API, BackendSpec, ProbeContext
from tests.core.plugin.installed import Boot

CORE = SettingsTree.build()
OPTIONS = list(CORE.options())

every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)


def load(given: dict[str, Given] | None = None, env: dict[str, str] | None = None) -> Settings:
    model = {"model": Given("m", "MODEL")}
    return load_settings(CORE, {**model, **(given or {})}, env=env or {})


@every_option
def test_a_default_survives_being_given_as_text(option: Option) -> None:
    if option.info.is_required():
        return
    text = "auto" if option.default is None else str(option.default)
    if option.default is None and base_type(option.info) is str:
        return  # an unset text has no spelling
    settings = load({option.path: Given(text, option.flags[0], is_text=True)})
    assert settings.given[option.path] == option.default


@every_option
def test_an_option_says_its_unit_and_reader(option: Option) -> None:
    assert re.search(r"\. Read by [a-z -]+\.$", option.info.description or "")


@every_option
def test_a_number_has_a_range(option: Option) -> None:
    if base_type(option.info) in (int, float):
        kinds = {type(mark) for mark in option.info.metadata}
        assert kinds & {Ge, Gt}
        assert kinds & {Le, Lt}


def test_the_flags_of_the_reference_are_there() -> None:
    reference = {
        "--model", "--model-path", "--dtype", "--tensor-parallel-size", "--tp-size", "--tp",
        "--max-running-requests", "--max-seq-len-override", "--memory-ratio", "--dummy-weight",
        "--cuda-graph-max-bs", "--graph", "--max-prefill-length", "--max-extend-length",
        "--num-pages", "--page-size", "--attention-backend", "--attn", "--model-source",
        "--cache-type", "--cache", "--moe-backend", "--moe", "--kernels", "--policy", "--comm",
        "--admission",
    }  # fmt: skip
    assert reference <= set(CORE.by_flag)


def test_settings_can_be_sent_to_another_process() -> None:
    settings = load({"page_size": Given(16, "page_size")})
    again: Settings = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.engine.page_size == 16


def test_a_section_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().engine.page_size = 3  # type: ignore[misc]  # the point of the test


def test_a_plugin_section_has_its_backends_prefix(boot: Boot) -> None:
    option = boot("acme-good").settings_tree().by_path["good.num_splits"]
    assert option.flags == ("--good.num-splits",)
    assert option.variable == "MINISGL_GOOD__NUM_SPLITS"


def test_a_plugin_section_reaches_its_backend(boot: Boot) -> None:
    plugins = boot("acme-good")
    settings = plugins.load_settings({"model": "m", "good": {"num_splits": 3}}, env={})
    section = settings.plugin("attention/acme-good:good")
    assert section is not None
    assert section.model_dump() == {"num_splits": 3}
    assert settings.plugin("attention/minisgl-core:torch") is None


def test_two_backends_with_one_settings_model_share_a_section(boot: Boot) -> None:
    plugins = boot("acme-kindred")
    settings = plugins.load_settings({"model": "m", "both": {"size": 5}}, env={})
    moe = settings.plugin("moe/acme-kindred:both")
    assert moe is not None
    assert moe is settings.plugin("comm/acme-kindred:both")


def test_one_name_with_two_models_gets_longer_prefixes(boot: Boot) -> None:
    paths = boot("acme-kindred").settings_tree().by_path
    assert {"moe-clash.size", "comm-clash.size"} <= set(paths)
    assert "clash.size" not in paths
    assert "policy-cache.size" in paths  # `cache:` in a file is the core's


def test_two_options_of_one_name_are_an_error() -> None:
    class Rival(SettingsSection):
        """Takes a name."""

        page_size: int = Field(1, ge=1, le=2, description="Size. Read by nobody.")

    with pytest.raises(PluginError, match=r"page_size: is a setting of both .*EngineSettings and"):
        SettingsTree.build([Section(Rival)])


def test_two_options_with_one_alias_are_an_error() -> None:
    class Rival(SettingsSection):
        """Takes a flag."""

        size: Annotated[int, Setting(flags=("--tp",))] = Field(
            1, ge=1, le=2, description="Size. Read by nobody."
        )

    with pytest.raises(PluginError, match="--tp: is a setting of both"):
        SettingsTree.build([Section(Rival)])


def test_the_table_of_the_docs_has_every_option(boot: Boot) -> None:
    table = render_table(boot("acme-good").settings_tree())
    for option in OPTIONS:
        assert f"| `{option.flags[0]}`" in table
    assert "`--good.num-splits` | `good.num_splits` | `MINISGL_GOOD__NUM_SPLITS`" in table
    assert "an integer from 0 to 8 | 0 | Parts. Read by good." in table


def test_every_core_section_is_in_the_settings() -> None:
    settings = load()
    assert set(settings.flat) == set(CORE_SECTIONS)
    assert settings.section(EngineSettings) is settings.engine


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "required",
            "its settings cannot be left to their defaults: ValidationError: 1",
        ),
        ("takes-a-name", "--tp: is a setting of both minisgl.config.sections.EngineSettings and"),
        ("no-model", "its settings are not a pydantic model but <class 'dict'>"),
    ],
)
def test_bad_settings_harm_only_who_picks_their_backend(boot: Boot, name: str, reason: str) -> None:
    plugins = boot("acme-bad-settings")
    settings = plugins.load_settings({"model": "m", "tp": 2}, env={})
    assert settings.engine.tp == 2
    assert plugins.resolve("cache", "radix", ProbeContext()).one.name == "radix"
    with pytest.raises(PluginError) as caught:
        plugins.resolve("cache", name, ProbeContext())
    assert reason in str(caught.value)


def test_one_name_in_two_distributions_gets_their_names_as_prefix() -> None:
    def offer(distribution: str) -> Offer:
        return Offer("moe", "twin", distribution, "1", EntryPoint("twin", "m:S", "minisgl.moe"))

    class Mine(SettingsSection):
        """Of one."""

    class Yours(SettingsSection):
        """Of the other."""

    spec = BackendSpec(api=PLUGIN_API, factory="m:f")
    sections = plugin_sections(
        [(offer("a"), replace(spec, settings=Mine)), (offer("b"), replace(spec, settings=Yours))]
    )
    assert [section.key for section in sections] == ["a-twin", "b-twin"]


def test_a_validators_own_words_are_kept() -> None:
    class Picky(SettingsSection):
        """Has opinions."""

        low: int = Field(1, ge=0, le=9, description="Low. Read by nobody.")
        high: int = Field(2, ge=0, le=9, description="High. Read by nobody.")

        @field_validator("high")
        @classmethod
        def _is_even(cls, value: int) -> int:
            if value % 2:
                raise ValueError("must be even")
            return value

        @model_validator(mode="after")
        def _is_ordered(self) -> Self:
            if self.low > self.high:
                raise ValueError(f"low {self.low} must not exceed high {self.high}")
            return self

    tree = SettingsTree.build([Section(Picky, key="picky")])
    with pytest.raises(SettingsError, match="^picky.high 3: must be even$"):
        load_keywords(tree, {"model": "m", "picky": {"high": 3}}, env={})
    with pytest.raises(SettingsError, match="^picky: low 5 must not exceed high 2$"):
        load_keywords(tree, {"model": "m", "picky": {"low": 5}}, env={})
