"""The ``minisgl`` command as a user types it: real processes, real exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from minisgl.cli.main import main
from tests.e2e.offline_harness import Tiny
from tests.tiny_models import TinyModel


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.save(tmp_path_factory.mktemp("cli_model"), TinyModel("llama", vocab_size=320))


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)


def minisgl(*arguments: str, stdin: str = "") -> Result:
    """Run the command in this process, which spares the import of torch."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(arguments)
    return Result(code, out.getvalue(), err.getvalue())


def minisgl_process(*arguments: str, stdin: str = "") -> Result:
    """Run the command as a shell does; whatever happens, nobody should see a traceback."""
    result = subprocess.run(
        [sys.executable, "-m", "minisgl", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in result.stderr
    return Result(result.returncode, result.stdout, result.stderr)


def test_text_goes_to_stdout_and_timing_to_stderr(tiny: Tiny) -> None:
    flags = ("--max-tokens", "8", "--ignore-eos")
    streamed = minisgl("generate", "--model", str(tiny.folder), "The capital", *flags)
    assert streamed.returncode == 0
    assert streamed.stderr.startswith("8 tokens in ")
    piped = minisgl_process(
        "generate", str(tiny.folder), "--no-stream", *flags, stdin="The capital"
    )
    assert (piped.returncode, piped.stdout) == (0, streamed.stdout)


def test_json_is_one_valid_document(tiny: Tiny) -> None:
    result = minisgl(
        *("generate", "--model", str(tiny.folder), "a", "b", "--json", "--logprobs", "2"),
        *("--n", "2", "--temperature", "1", "--max-tokens", "4", "--ignore-eos", "--top-k", "1"),
    )
    assert result.returncode == 0
    document = json.loads(result.stdout, parse_constant=pytest.fail)  # NaN and such are no JSON
    assert [output["prompt"] for output in document["outputs"]] == ["a", "b"]
    for output in document["outputs"]:
        assert len(output["choices"]) == 2
        assert len(output["token_ids"]) == len(output["logprobs"]) == 4
        assert output["usage"]["completion_tokens"] == 8
        assert output["finish_reason"] == "length"
    assert document["timing"]["num_tokens"] == 16


@pytest.mark.parametrize("command", [(), ("generate",), ("plugins",), ("version",)])
def test_help_says_how_to_use_a_command(command: tuple[str, ...]) -> None:
    result = minisgl(*command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: minisgl")


@pytest.mark.parametrize("command", [("plugins",), ("plugins", "doctor")])
def test_plugins_as_json_are_one_document(command: tuple[str, ...]) -> None:
    document = json.loads(minisgl(*command, "--json").stdout)
    assert isinstance(document, dict)


def complaint(*arguments: str, code: int) -> str:
    """Return the one line on stderr of a command that must fail, quietly on stdout."""
    result = minisgl(*arguments)
    assert (result.returncode, result.stdout) == (code, "")
    lines = result.stderr.splitlines()
    assert [line.startswith("minisgl: ") for line in lines] == [True]
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--page-sise", "4"), ("--page-sise: unknown flag", "did you mean --page-size")),
        (("--page-size", "0"), ("--page-size 0: must be an integer from 1",)),
        (("--dtype", "int8"), ("--dtype int8: must be one of auto, float32",)),
        (("--temperature", "-1"), ("--temperature -1.0: must be a number from 0",)),
        (("--top-p", "2"), ("--top-p 2.0: must be a number above 0 and at most 1",)),
        (("--max-tokens", "0"), ("--max-tokens 0: must be an integer from 1",)),
        (("--max-tokens", "-3"), ("--max-tokens -3: must be an integer from 1",)),
        (("--max-tokens", "many"), ("--max-tokens", "many")),
        (("--tp", "0"), ("--tp 0: must be an integer from 1",)),
        (("--device", "cuda:99"), ("--device cuda:99: ",)),
        (("--seed", "x"), ("--seed", "'x'")),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    tiny: Tiny, flags: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    line = complaint("generate", "--model", str(tiny.folder), "hello", *flags, code=2)
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--attn", "zz"), ("--attn zz", "installed: ", "torch")),
        (("--attn", "torch,zz"), ("--attn torch,zz", "installed: ", "torch")),
        (("--cache", "redix"), ("--cache redix", "naive", "radix")),
        (("--policy", "zz"), ("--policy zz", "fcfs")),
        (("--kernels", "torch,zz"), ("--kernels torch,zz", "torch")),
        (("--model-source", "zz"), ("--model-source zz", "local")),
    ],
)
def test_an_unknown_backend_lists_what_is_installed(
    tiny: Tiny, flags: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    line = complaint("generate", "--model", str(tiny.folder), "hello", *flags, code=1)
    assert [part for part in parts if part not in line] == []


def test_a_known_backend_that_is_not_installed_says_what_to_install(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_PLUGINS", "minisgl-core")
    line = complaint("generate", "--model", str(tiny.folder), "hello", "--attn", "fi", code=1)
    assert "minisgl-attn-flashinfer" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code"),
    [(("--page-sise", "4"), 2), (("--attn", "zz"), 1), (("--top-p", "2"), 2), (("--tp", "0"), 2)],
)
def test_a_process_ends_with_the_same_words_and_code(
    tiny: Tiny, flags: tuple[str, ...], code: int
) -> None:
    command = ("generate", "--model", str(tiny.folder), "hello", *flags)
    assert minisgl_process(*command) == minisgl(*command)
    assert minisgl(*command).returncode == code


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    line = complaint("generate", "--model", str(tmp_path / "nowhere"), "hello", code=1)
    assert str(tmp_path / "nowhere") in line
    empty = tmp_path / "empty"
    empty.mkdir()
    line = complaint("generate", "--model", str(empty), "hello", code=1)
    assert "config.json" in line


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(tiny: Tiny) -> None:
    line = complaint(
        *("generate", "--model", str(tiny.folder), "a b c d e f", "--max-seq-len-override", "4"),
        code=2,
    )
    assert "may have 4" in line


def test_an_empty_prompt_is_refused(tiny: Tiny) -> None:
    line = complaint("generate", "--model", str(tiny.folder), "", code=2)
    assert "prompt: is empty" in line


def test_a_damaged_checkpoint_is_named(tiny: Tiny, tmp_path: Path) -> None:
    for path in tiny.folder.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[:-1000] if path.suffix == ".safetensors" else data)
    line = complaint("generate", "--model", str(tmp_path), "hello", code=1)
    assert "model.safetensors" in line


@pytest.mark.slow
def test_an_unwritable_answer_is_no_traceback(tiny: Tiny) -> None:
    command = [sys.executable, "-m", "minisgl", "generate", "--model", str(tiny.folder), "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1
