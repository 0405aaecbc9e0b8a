"""What the server's own settings allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.config.fields import base_type, is_list
from minisgl.config.load import Given, load_settings
from minisgl.config.tree import Section, SettingsTree
from minisgl.errors import SettingsError
from minisgl_server.settings import ServerSettings

TREE = SettingsTree.build([Section(ServerSettings, commands=("serve",))])
MODEL = {"model": Given("m", "--model", is_text=True)}


def from_flag(path: str, text: str) -> ServerSettings:
    flag = Given(text, TREE.by_path[path].flags[0], is_text=True)
    return load_settings(TREE, MODEL | {path: flag}, env={}).section(ServerSettings)


@pytest.mark.parametrize("text", ["", " ", ",", "one,", ",one", "one, ,two", '["one", ""]'])
@pytest.mark.parametrize("path", ["api_key", "cors_origins", "served_model_name"])
def test_an_empty_entry_of_a_list_is_an_error(path: str, text: str) -> None:
    with pytest.raises(SettingsError, match=TREE.by_path[path].flags[0]):
        from_flag(path, text)


@pytest.mark.parametrize("text", ["", ",", "one,"])
def test_an_empty_key_in_the_environment_does_not_open_the_server(text: str) -> None:
    with pytest.raises(SettingsError, match="^MINISGL_API_KEY: must be keys separated by commas"):
        load_settings(TREE, MODEL, env={"MINISGL_API_KEY": text})


@pytest.mark.parametrize("text", ["api_key: ''", "api_key: [a, '']", "api_key:", "api_key: [' ']"])
def test_an_empty_key_in_a_file_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match="api_key: must be keys"):
        load_settings(TREE, MODEL, env={}, config=path)


def test_an_error_does_not_show_the_keys() -> None:
    with pytest.raises(SettingsError) as caught:
        from_flag("api_key", "secret,")
    assert "secret" not in str(caught.value)


def test_keys_are_read_without_the_spaces_around_them() -> None:
    assert from_flag("api_key", " one, two ").api_key == ("one", "two")


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("root_path", "nope", "must be empty, or a path such as /llm that does not end in /"),
        ("root_path", "/llm/", "must be empty, or a path such as /llm that does not end in /"),
        ("host", "", "--host '': must be text of 1 to 255 characters"),
        ("uds", "x" * 120, "must be text of 1 to 107 characters"),
        ("served_model_name", "[1, null]", "must be a list of texts that are not empty"),
    ],
)
def test_a_refusal_says_what_is_allowed(path: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_flag(path, text)
    assert message in str(caught.value)


TEXTS = [
    option.path
    for option in TREE.options()
    if base_type(option.info) is str or is_list(option.info)
]


def test_there_are_text_settings_of_every_kind() -> None:
    assert {"model", "revision", "attn", "record", "host", "root_path", "api_key"} < set(TEXTS)


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("text", ["\udce9", "/a\ud800"])
def test_text_of_another_encoding_is_refused(path: str, text: str) -> None:
    with pytest.raises(SettingsError, match="must be UTF-8 text$"):
        from_flag(path, text)
