"""Running commands of the documentation that `Shell` only checks: installing, testing, serving."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.core.cli.new_plugins import install, seeing
from tests.docs.doc_commands import Shell, examples, subcommand
from tests.packaging.workspace import ROOT
from tests.server.server_process import ServerProcess

NEED_A_GPU = {"fa", "fi", "cuda", "fused"}


@dataclass
class RealShell(Shell):
    """A shell in which distributions that can be built here are installed beside the environment.

    Attributes:
        site: Where they are installed.
        served: Command lines of the servers that were started.
    """

    site: Path = field(default_factory=Path)
    served: list[str] = field(default_factory=list)

    def _run_minisgl(self, words: list[str], given: str) -> str:
        if subcommand(words) == "serve" and self._can_serve(words):
            return self._serve(words)
        if words == ["plugins"]:  # in a process of its own, which sees what was installed
            return self._process("minisgl", *words)
        return super()._run_minisgl(words, given)

    def _can_serve(self, words: list[str]) -> bool:
        """Whether what is asked for works here; other machines and GPUs are not here."""
        names = {name for word in words for name in word.split(",")}
        example_names = {name for _, name in examples()}
        return not names & NEED_A_GPU and "--nnodes" not in words and not names & example_names

    def _serve(self, words: list[str]) -> str:
        """Start a server, let it answer, and end it."""
        folder = self.folder / f"server-{len(self.served)}"
        folder.mkdir()
        rest = [word for word in words if word != "serve"]
        model, flags = rest[0], rest[1:]
        if model == "--model":
            model, flags = flags[0], flags[1:]
        model = self.substituted([model])[0] if model != "demo" else model
        with ServerProcess(model, folder, *flags, PYTHONPATH=str(self.site)) as server:
            server.wait_until_ready()
            body = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
            with server.client() as client:
                answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert server.end() == 0, server.log
            log = server.log
        self.served.append(" ".join(words))
        return log

    def _run_pip(self, words: list[str], given: str) -> str:
        super()._run_pip(words, given)
        for word in words:
            bare = self.folder / word.partition("[")[0]
            if (bare / "pyproject.toml").is_file() and not bare.is_relative_to(ROOT):
                install([bare], self.site)
        return ""

    def _run_pytest(self, words: list[str], given: str) -> str:
        super()._run_pytest(words, given)
        if any((ROOT / word).is_file() for word in words):
            return ""  # a file of this repository's own tests
        return self._process("pytest", "-p", "no:cacheprovider", *words)

    def _process(self, module: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.folder,
            env=seeing(self.site),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{module} {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout
