"""Running every command of a page for real: installing, building, testing, serving."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.docs.doc_blocks import Command
from tests.docs.doc_commands import MODELS, URL, is_server
from tests.docs.real_servers import Servers
from tests.docs.stand_ins import refusal, with_stand_ins
from tests.tiny_models import TinyModel, build_tokenizer, save_tiny_model

MASTER = "10.0.0.1:29500"
MAY_FAIL = ("plugins", "doctor")
"""It may well find that a library is missing."""

QUESTION = "Hello\n"
"""The input of what reads one, where nothing else is piped into it."""


@dataclass
class RealShell:
    """Where the commands of one page run, one after another, as processes.

    Attributes:
        folder: Where they run.
        env: Variables, `PATH` among them.
        make_env: Further variables of `make`; asked for late.
        server_url: Of the server for pages that start none; asked for late.
        output: What the last command printed.
        installed: Folders of plugins that were written and installed.
        num_run: Commands that were run.
    """

    folder: Path
    env: dict[str, str] = field(repr=False)
    make_env: Callable[[], dict[str, str]]
    server_url: Callable[[], str]
    output: str = ""
    installed: set[str] = field(default_factory=set)
    num_run: int = 0
    servers: Servers = field(init=False)
    models: Models = field(init=False)

    def __post_init__(self) -> None:
        self.servers = Servers(self.folder)
        self.models = Models(self.folder)

    def run(self, documented: Command) -> None:
        """Run one command; what is wrong with it fails the test."""
        self.num_run += 1
        command = with_stand_ins(documented)
        words = [self._here(word) for word in command.words]
        if Path(words[0]).name == "pytest":
            self._install_what_was_written(words)
        env = self.env | dict(command.env) | (self.make_env() if words[0] == "make" else {})
        if is_server(words) and not refusal(words):
            self.servers.start(words, env)
            return
        if words[1:3] == ["bench", "serve"] and "--url" not in words:
            words += ["--url", self._here(f"{URL}/v1")]
        given = self.output if command.reads_previous else QUESTION
        self.output = self._process(words, env, given)
        if command.output:
            (self.folder / command.output).write_text(self.output)
        if words[0] == "pip":
            self.installed |= {word.partition("[")[0] for word in words}

    def _here(self, word: str) -> str:
        """Put what is here in place of models, servers and machines of the documentation."""
        if URL in word:
            return word.replace(URL, self.servers.url or self.server_url())
        if word == MASTER:
            return self.servers.address()
        return str(self.models.stand_in(word)) if word != "demo" and MODELS.match(word) else word

    def _install_what_was_written(self, words: Sequence[str]) -> None:
        """Install plugins that the page has told to write, as docs/plugins.md says."""
        for name in sorted(_written(self.folder) - self.installed) if "--backend" in words else ():
            self._process(["pip", "install", "--editable", f"./{name}"], self.env, "")
            self.installed.add(name)

    def _process(self, words: Sequence[str], env: dict[str, str], given: str) -> str:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=env,
            input=given,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        said = f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        if pattern := refusal(words):
            assert done.returncode in (1, 2), said
            assert re.search(pattern, done.stderr), said
            assert "Traceback" not in done.stderr, said
        else:
            assert done.returncode == 0 or tuple(words[1:3]) == MAY_FAIL, said
        return done.stdout


@dataclass(frozen=True)
class Models:
    """Tiny models in place of those of the documentation, made when one is first asked for."""

    folder: Path

    def stand_in(self, name: str) -> Path:
        """Return the folder of a model of the same architecture."""
        arch = "gemma3" if "gemma-3" in name else "qwen3_moe" if "A3B" in name else "llama"
        place = self.folder / "models" / arch
        if not place.exists():
            save_gemma(place) if arch == "gemma3" else save_tiny_model(
                place, TinyModel(arch, vocab_size=320, num_kv_heads=4, max_positions=2048)
            )
        return place


def save_gemma(folder: Path) -> None:
    """Write a random Gemma 3, which the core does not know."""
    config = Gemma3TextConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        Gemma3ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def _written(folder: Path) -> set[str]:
    """Return the folders of plugins with a suite that `minisgl plugins new` has written."""
    found = (path.parent for path in folder.glob("minisgl-*/pyproject.toml"))
    return {path.name for path in found if (path / "tests" / "test_conformance.py").exists()}
