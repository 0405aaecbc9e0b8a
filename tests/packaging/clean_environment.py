"""A fresh virtual environment with a wheel and exactly what its metadata asks for.

Third-party packages are linked in from the running environment instead of being downloaded again;
nothing else of that environment can be seen, so a dependency that was not declared is missing. A
library that the running environment lacks too (FlashInfer on a machine without a GPU) is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.workspace import distributions

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))


def make_environment(folder: Path, wheels: list[Path], extra: Iterable[str] = ()) -> Path:
    """Make the environment.

    Args:
        folder: Where to make it.
        wheels: Wheels to install, with the requirements that they declare.
        extra: Names of further packages to have, with what they require.

    Returns:
        The path of its Python.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    inside = {"base": str(folder), "platbase": str(folder)}
    target = Path(sysconfig.get_path("purelib", scheme="venv", vars=inside))
    for name in sorted(requirements_of(wheels, extra)):
        for entry in top_level(distribution(name)):
            if not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    install(python, *map(str, wheels))
    return python


def install(python: Path, *what: str) -> None:
    """Install wheels or folders, and nothing that they require, into an environment."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    flags = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, *flags, *what], check=True, env=outside())


def outside() -> dict[str, str]:
    """Return variables with which neither the checkout nor its environment can be seen."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "MINISGL_", "CUDA_VISIBLE_DEVICES")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    return env | {"CUDA_VISIBLE_DEVICES": ""}  # a machine without a GPU, whatever this one has


@contextmanager
def serving(command: list[str], folder: Path, timeout_s: float = 240.0) -> Iterator[str]:
    """Run a server, and yield its URL once it is ready."""
    log = folder / "server.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, cwd=folder, env=outside(), stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(r"ready: serving .* at (\S+) \(", log.read_text())):
            assert server.poll() is None, f"ended early\n{log.read_text()}"
            assert time.monotonic() < deadline, f"timed out\n{log.read_text()}"
            time.sleep(0.1)
        yield found[1]
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        finally:
            server.kill()


def requirements_of(wheels: list[Path], extra: Iterable[str] = ()) -> set[str]:
    """Names of all third-party packages that wheels and packages need, directly or not."""
    own = {dist.name for dist in distributions()}
    waiting = [req for wheel in wheels for req in declared(wheel) if req.name not in own]
    waiting += map(Requirement, extra)
    needed: set[str] = set()
    while waiting:
        req = waiting.pop()
        name = canonicalize_name(req.name)
        if is_installed(name) and (name not in needed or req.extras):
            needed.add(name)
            waiting += applicable(distribution(name).requires or [], req.extras)
    return needed


def is_installed(name: str) -> bool:
    return any(True for _ in Distribution.discover(name=name))


def declared(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    return applicable(metadata.get_all("Requires-Dist", []), set())


def applicable(texts: Iterable[str], extras: set[str]) -> Iterator[Requirement]:
    """The requirements that count on this machine with these extras."""
    for req in map(Requirement, texts):
        marker = req.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield req


def top_level(dist: Distribution) -> set[Path]:
    """The files and folders directly in site-packages that a package owns."""
    files = [file for file in dist.files or [] if file.parts[0] not in {"..", "__pycache__"}]
    return {SITE_PACKAGES / file.parts[0] for file in files}
