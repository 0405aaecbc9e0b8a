"""The completion scripts, as the shells themselves run them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.cli.main import main

ASK_BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_minisgl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        run = [sys.executable, "-m", "minisgl", "completion", shell]
        (folder / shell).write_bytes(subprocess.run(run, check=True, capture_output=True).stdout)
    return folder


def offered(scripts: Path, *words: str) -> set[str]:
    """What bash offers for the last word, in a folder without files."""
    quoted = " ".join(shlex.quote(word) for word in ("minisgl", *words))
    script = ASK_BASH.format(script=scripts / "bash", words=quoted)
    empty = scripts / "empty"
    empty.mkdir(exist_ok=True)
    run = subprocess.run(
        ["bash", "-c", script], check=True, capture_output=True, text=True, cwd=empty
    )
    assert run.stderr == ""
    return set(run.stdout.split())


def test_subcommands_are_offered_first(scripts: Path) -> None:
    assert {"generate", "plugins", "serve", "completion"} <= offered(scripts, "")
    assert offered(scripts, "gen") == {"generate"}


def test_flags_are_those_of_the_settings_tree(scripts: Path) -> None:
    assert offered(scripts, "generate", "--page") == {"--page-size"}
    assert "--port" in offered(scripts, "serve", "--")
    assert "--port" not in offered(scripts, "generate", "--")
    assert offered(scripts, "--page-s") == {"--page-size"}  # serve is the default


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (("serve", "--attn", ""), {"auto", "torch"}),
        (("serve", "--cache", "=", "ra"), {"radix"}),
        (("generate", "--policy", ""), {"fcfs", "lpm", "priority"}),
        (("serve", "--log-format", ""), {"text", "json"}),
        (("serve", "--model", "de"), {"demo"}),
        (("generate", "de"), {"demo"}),
        (("bench", ""), {"serve"}),
        (("bench", "serve", "--request-r"), {"--request-rate"}),
        (("plugins", ""), {"doctor"}),
        (("completion", ""), {"bash", "zsh", "fish"}),
    ],
)
def test_values_are_those_that_are_installed(
    scripts: Path, words: tuple[str, ...], some: set[str]
) -> None:
    assert some <= offered(scripts, *words)


def test_a_list_goes_on_after_its_comma(scripts: Path) -> None:
    assert offered(scripts, "serve", "--attn", "torch,tor") == {"torch,torch"}


def test_a_value_that_cannot_be_known_is_not_guessed(scripts: Path) -> None:
    assert offered(scripts, "serve", "--port", "") == set()


def test_files_are_offered_where_they_make_sense(scripts: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.touch()
    assert offered(scripts, "serve", "--chat-template", f"{tmp_path}/t") == {str(path)}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_valid(scripts: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([shell, "-n", scripts / shell], check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("minisgl serve --attn ", {"auto", "torch"}),
        ("minisgl bench s", {"serve"}),
        ("minisgl bench serve --request-r", {"--request-rate"}),
    ],
)
def test_fish_offers_the_same(scripts: Path, line: str, some: set[str]) -> None:
    script = f"source {scripts / 'fish'}; complete -C {shlex.quote(line)}"
    run = subprocess.run(["fish", "-c", script], check=True, capture_output=True, text=True)
    assert some <= {each.split("\t")[0] for each in run.stdout.splitlines()}


def test_nothing_heavy_is_imported() -> None:
    script = "import sys; from minisgl.cli.main import main; code = main(['completion', 'bash'])\n"
    script += "sys.exit(code or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_a_clear_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", *words]) == 2
    assert "name one shell of bash, zsh, fish" in capsys.readouterr().err
