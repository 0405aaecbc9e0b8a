from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minisgl.config.fields import format_bytes, parse_bytes
from minisgl.config.load import Given, Settings, load_keywords, load_settings
from minisgl.config.tree import SettingsTree
from minisgl.errors import SettingsError
from tests.core.plugin.installed import Boot

TREE = SettingsTree.build()
MODEL = {"model": Given("m", "--model", is_text=True)}


def flag(path: str, text: str) -> dict[str, Given]:
    return {path: Given(text, TREE.by_path[path].flags[0], is_text=True)}


def keywords(**given: Any) -> Settings:  # Any: as LLM(...) takes them
    return load_keywords(TREE, {"model": "m", **given}, env={})


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("model: from-file\npage-size: 1\ntp: 2\nnum_pages: 3\n")
    env = {"MINISGL_PAGE_SIZE": "10", "MINISGL_TP": "20", "MINISGL_CONFIG": str(path)}
    settings = load_settings(TREE, flag("page_size", "100"), env=env)
    engine = settings.engine
    assert (engine.page_size, engine.tp, engine.num_pages) == (100, 20, 3)
    assert engine.max_running_requests == 256
    assert settings.origins == {
        "model": f"{path}: model",
        "page_size": "--page-size",
        "tp": "MINISGL_TP",
        "num_pages": f"{path}: num_pages",
    }


def test_toml_files_work_alike(tmp_path: Path, boot: Boot) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('model = "m"\noverlap = false\n[good]\nnum-splits = 4\n')
    settings = load_settings(boot("acme-good").settings_tree(), env={}, config=path)
    assert settings.scheduler.overlap is False
    section = settings.plugin("attention/acme-good:good")
    assert section is not None
    assert section.model_dump() == {"num_splits": 4}


@pytest.mark.parametrize(
    ("given", "env", "message"),
    [
        (
            flag("page_size", "0"),
            {},
            "--page-size 0: must be an integer from 1 to 65536, or auto",
        ),
        (flag("page_size", "x"), {}, "--page-size x: must be an integer from 1 to 65536, or auto"),
        (
            flag("memory_ratio", "nan"),
            {},
            "--memory-ratio nan: must be a number above 0 and at most 1",
        ),
        (
            flag("dtype", "int8"),
            {},
            "--dtype int8: must be one of auto, float32, float16, bfloat16",
        ),
        (flag("device", "tpu"), {}, "--device tpu: must be auto, cpu, cuda or cuda:N"),
        (
            {},
            {"MINISGL_ADMISSION": "hopeful"},
            "MINISGL_ADMISSION hopeful: must be one of optimistic, reserve",
        ),
        ({}, {"MINISGL_OVERLAP": "maybe"}, "MINISGL_OVERLAP maybe: must be true or false"),
        (
            {},
            {"MINISGL_PAGE_SISE": "1"},
            "MINISGL_PAGE_SISE: unknown environment variable; did you mean MINISGL_PAGE_SIZE",
        ),
        ({}, {"MINISGL_QQQ": "1"}, "MINISGL_QQQ: unknown environment variable"),
    ],
)
def test_a_wrong_value_names_its_origin_and_what_is_allowed(
    given: dict[str, Given], env: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(TREE, {**MODEL, **given}, env=env)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_size: 0", "{path}: page_size 0: must be an integer from 1 to 65536, or auto"),
        ("page_sise: 1", "{path}: page_sise: unknown key; did you mean page_size"),
        ("tp: true", "{path}: tp True: must be an integer from 1 to 1024"),
        ("- 1", "--config {path}: must hold a mapping of setting names to values"),
        ("fa: {num_splits: 1}\nzz: {a: 1}", "{path}: zz: unknown key"),
        ("dtype:", "{path}: dtype null: must be one of auto, float32, float16, bfloat16"),
    ],
)
def test_a_wrong_file_names_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "settings.yml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(TREE, MODEL, env={}, config=path)
    assert message.format(path=path) in str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("settings.yaml", "a: [", "cannot be read"),
        ("settings.toml", "a = ", "cannot be read"),
        ("settings.ini", "", "must be a .yaml, .yml or .toml file"),
        ("missing.yaml", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, name: str, text: str | None, reason: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=f"--config .*{name}: {reason}"):
        load_settings(TREE, MODEL, env={}, config=path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("port: [", "cannot be read: line 1, column 8: expected the node content, .*"),
        ("a: \x01", "cannot be read: unacceptable character .*"),
        ("a: 2024-13-45", "cannot be read: month must be in 1[.][.]12"),
        ("a: !!python/name:os.system", "cannot be read: line 1, column 4: could not .*"),
        ("[" * 5000, "cannot be read: it is nested too deeply"),
        ("a: " + "[" * 40 + "]" * 40, "must have at most 32 levels"),
        ("api_key: &a [*a]", "must have at most 32 levels"),
        ("api_key: &a {b: *a}", "must have at most 32 levels"),
    ],
    ids=range(8),
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(TREE, MODEL, env={}, config=path)
    assert re.fullmatch(f"--config {path}: {reason}", str(caught.value))


@pytest.mark.parametrize(
    ("text", "shown"), [("", "null"), ("[a]", "['a']"), ("5", "5"), ("''", "''")]
)
def test_a_model_that_is_no_text_is_refused(tmp_path: Path, text: str, shown: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"model: {text}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(TREE, env={}, config=path)
    allowed = "a folder, .gguf file, hub id or demo"
    assert str(caught.value) == f"{path}: model {shown}: must be {allowed}"


@pytest.mark.parametrize("value", ["5", "[1]", "text"])
def test_a_section_takes_no_value_of_its_own(tmp_path: Path, boot: Boot, value: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"good: {value}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(boot("acme-good").settings_tree(), MODEL, env={}, config=path)
    reason = f"good {value}: must be a mapping of the settings of good"
    assert str(caught.value) == f"{path}: {reason}"


def test_a_section_with_nothing_below_it_is_empty(tmp_path: Path, boot: Boot) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("good:\n  # num_splits: 4\n")
    settings = load_settings(boot("acme-good").settings_tree(), MODEL, env={}, config=path)
    assert settings.given == {"model": "m"}


def test_a_keyword_of_a_section_is_a_mapping(boot: Boot) -> None:
    tree = boot("acme-good").settings_tree()
    with pytest.raises(SettingsError, match="^good 5: must be a mapping of the settings of good$"):
        load_keywords(tree, {"model": "m", "good": 5}, env={})


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("# nothing yet\n")
    assert load_settings(TREE, MODEL, env={}, config=path).given == {"model": "m"}


def test_all_that_is_wrong_is_said_at_once() -> None:
    env = {"MINISGL_TP": "0", "MINISGL_ADMISSIN": "x"}
    with pytest.raises(SettingsError) as caught:
        load_settings(TREE, flag("page_size", "-1"), env=env)
    lines = str(caught.value).splitlines()
    assert sorted(line.split()[0].rstrip(":") for line in lines) == [
        "--page-size",
        "MINISGL_ADMISSIN",
        "MINISGL_TP",
        "model",
    ]


def test_a_missing_model_says_how_to_give_it() -> None:
    message = "model: is missing; give it as --model, MINISGL_MODEL or the key model"
    with pytest.raises(SettingsError, match=message):
        load_settings(TREE, env={})


def test_keywords_of_the_reference_are_understood() -> None:
    settings = keywords(
        max_running_req=4, num_page_override=9, attention_backend="torch", cache_type="naive"
    )
    assert settings.engine.max_running_requests == 4
    assert settings.engine.num_pages == 9
    assert settings.backends.attn == "torch"
    assert settings.backends.cache == "naive"


def test_a_torch_dtype_and_a_path_may_be_keywords(tmp_path: Path) -> None:
    class FakeDtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    settings = load_keywords(TREE, {"model": tmp_path, "dtype": FakeDtype()}, env={})
    assert settings.model.dtype == "bfloat16"
    assert settings.model.model == str(tmp_path)


def test_a_keyword_that_is_none_counts_as_not_given() -> None:
    assert keywords(page_size=None, revision=None).given == {"model": "m"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page_sise": 1}, "page_sise: unknown setting; did you mean page_size"),
        ({"max_running_req": 0}, "max_running_req 0: must be an integer from 1 to 65536"),
        ({"overlap": "perhaps"}, "overlap perhaps: must be true or false"),
        ({"memory_ratio": True}, "memory_ratio True: must be a number above 0 and at most 1"),
        (
            {"max_running_req": 1, "max_running_requests": 1},
            "max_running_requests: is the same setting as max_running_req",
        ),
    ],
)
def test_a_wrong_keyword_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        keywords(**given)
    assert str(caught.value) == message


def test_what_was_given_can_be_given_again_as_keywords(boot: Boot) -> None:
    tree = boot("acme-good").settings_tree()
    first = load_keywords(tree, {"model": "m", "tp": 2, "good": {"num_splits": 4}}, env={})
    again = load_keywords(tree, first.given, env={})
    assert again.given == first.given == {"model": "m", "tp": 2, "good.num_splits": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1073741824", 2**30), ("2GiB", 2**31), ("1.5g", 1_500_000_000), ("512 MiB", 2**29)],
)
def test_a_size_may_have_a_unit(text: str, expected: int) -> None:
    settings = load_settings(TREE, {**MODEL, **flag("cpu_kv_cache_bytes", text)}, env={})
    assert settings.engine.cpu_kv_cache_bytes == expected


def test_a_size_with_an_unknown_unit_is_refused() -> None:
    with pytest.raises(SettingsError, match="--cpu-kv-cache-bytes 1XB: must be a size from 1MiB"):
        load_settings(TREE, {**MODEL, **flag("cpu_kv_cache_bytes", "1XB")}, env={})


def test_an_optional_number_may_be_left_to_the_engine() -> None:
    env = {"MINISGL_CUDA_GRAPH_MAX_BS": "8"}
    settings = load_settings(TREE, {**MODEL, **flag("cuda_graph_max_bs", "auto")}, env=env)
    assert settings.engine.cuda_graph_max_bs is None


@pytest.mark.parametrize(
    ("value", "text"), [(2**30, "1GiB"), (3 * 2**20, "3MiB"), (1000, "1000"), (0, "0")]
)
def test_a_size_is_written_as_it_can_be_read(value: int, text: str) -> None:
    assert format_bytes(value) == text
    assert parse_bytes(text) == value
