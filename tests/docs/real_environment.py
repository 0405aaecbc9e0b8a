"""Virtual environments for the commands of the documentation, made without an index of packages.

Third-party packages are those of the running environment. What that one lacks, such as FlashInfer
on a machine without a GPU, has an empty stand-in among our wheels, so that pip has everything that
it resolves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.docs.doc_blocks import DOCUMENTS, page_commands
from tests.packaging.clean_environment import applicable, is_installed
from tests.packaging.workspace import ROOT, Distribution, distributions

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
HIDDEN = ("CUDA_", "HF_", "MAKE", "MFLAGS", "MINISGL_", "PIP_", "PYTEST_", "PYTHON", "VIRTUAL_ENV")


def make_environment(folder: Path, bare: Path | None = None) -> Path:
    """Make an environment with what the running one has.

    Args:
        folder: Where to make it.
        bare: What `link_others` made, for an environment without our distributions.

    Returns:
        The folder of its programs.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    line = str(bare) if bare else f"import site; site.addsitedir({str(SITE_PACKAGES)!r})"
    (site / "zz_linked.pth").write_text(f"{line}\n")  # last, behind what pip makes editable
    link_programs(folder / "bin", without="minisgl" if bare else "")
    return folder / "bin"


def link_others(folder: Path) -> Path:
    """Fill a folder with links to all packages that are not ours, and return it.

    It is no part of an environment that sees it, so pip takes nothing out of it.
    """
    folder.mkdir()
    for path in SITE_PACKAGES.iterdir():
        is_ours = path.name.startswith(("minisgl_", "_editable_impl_minisgl_"))
        if not is_ours and path.name != "__pycache__":
            (folder / path.name).symlink_to(path)
    return folder


def link_programs(target: Path, without: str) -> None:
    """Put the programs of the running environment into one that has its packages."""
    for path in Path(sys.executable).parent.iterdir():
        program = target / path.name
        if path.is_dir() or program.exists() or path.name == without:
            continue
        content = path.read_bytes()
        first, _, rest = content.partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            program.write_bytes(f"#!{target / 'python'}\n".encode() + rest)
            program.chmod(0o755)
        else:
            program.symlink_to(path)


def variables(programs: Path, wheels: Path | None = None) -> dict[str, str]:
    """Return the variables of a shell that finds an environment's programs first, and no GPU."""
    clean = {key: text for key, text in os.environ.items() if not key.startswith(HIDDEN)}
    return clean | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # as pip reads it: no isolation
        "PIP_NO_INDEX": "1",
        **({"PIP_FIND_LINKS": str(wheels)} if wheels else {}),
    }


def build_wheels(folder: Path) -> Path:
    """Build our distributions and the examples, and a stand-in for each library that is missing."""
    projects = [dist.folder for dist in (*distributions(), *example_distributions())]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *flags, *map(str, projects)], check=True)
    for requirement in missing_requirements():
        write_stand_in(folder, requirement)
    return folder


def example_distributions() -> list[Distribution]:
    """Return the distributions in ``examples/plugins/``."""
    return [Distribution(each.parent) for each in ROOT.glob("examples/plugins/*/pyproject.toml")]


def missing_requirements() -> Iterator[Requirement]:
    """Yield what our distributions and the documented extras ask for and this environment lacks."""
    waiting = [each for dist in distributions() for each in dist.requirements]
    waiting += documented_extras()
    known: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in known or name.startswith("minisgl-"):
            continue
        known.add(str(requirement))
        if not is_installed(name):
            yield requirement
        elif requirement.extras:
            waiting += applicable(distribution(name).requires or [], requirement.extras)


def documented_extras() -> Iterator[Requirement]:
    """Yield what pip is told to install with extras, but for folders."""
    for document in DOCUMENTS:
        for command in page_commands(document):
            for word in command.words if command.words[0] == "pip" else ():
                if "[" in word and "/" not in word:
                    yield Requirement(word)


def write_stand_in(folder: Path, requirement: Requirement) -> None:
    """Write a wheel without content that meets a requirement."""
    name = canonicalize_name(requirement.name).replace("-", "_")
    bounds = [each for each in requirement.specifier if each.operator in (">=", "==", "~=")]
    least = [Version(each.version.removesuffix(".*")) for each in bounds]
    version = str(max(least, default=Version("1")))
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {requirement.name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "".join(
            f"{info}/{each},,\n" for each in ("METADATA", "WHEEL", "RECORD")
        ))  # fmt: skip
