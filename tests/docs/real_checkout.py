"""A copy of the checkout in which `make` does everything that it does for a developer.

Nothing is downloaded: the ``.venv/`` that ``make setup`` creates sees the packages of the running
environment, which pip finds to be what ``constraints.txt`` and the groups ask for. Recipes that run
tests run a few, chosen by ``PYTEST_ADDOPTS``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.core.cli.new_plugins import copy_type_cache
from tests.packaging.workspace import ROOT, project_files, relative

FEW_TESTS = 'tests/packaging -k "test_versions or (test_the_metadata and minisgl-server)"'
"""Both a slow and a quick one, in the folder that some recipes name."""

PYTHON = """#!{python}
import os, sys
from pathlib import Path
if sys.argv[1:3] == ["-m", "venv"]:
    sys.path.insert(0, {root!r})
    from tests.docs.real_environment import make_environment
    make_environment(Path(sys.argv[3]).absolute())
else:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def copy_checkout(folder: Path) -> None:
    """Copy every file that is, or would be, under version control."""
    for path in project_files():
        target = folder / relative(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)  # tests list its files


def make_variables(folder: Path) -> dict[str, str]:
    """Return what `make` needs to know here.

    Args:
        folder: An empty one for what it uses.
    """
    python = folder / "python3"
    python.write_text(PYTHON.format(python=sys.executable, root=str(ROOT)))
    python.chmod(0o755)
    return {
        "MYPY_CACHE_DIR": str(copy_type_cache(folder / "types")),
        "PYTEST_ADDOPTS": FEW_TESTS,
        "PYTHON": str(python),
    }
