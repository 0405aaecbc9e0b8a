from __future__ import annotations

import pytest

from tests.core.plugin.installed import RunPython

HEAVY = {"torch", "triton", "numpy", "transformers", "flashinfer", "flash_attn", "yaml", "zmq"}

# Seconds of CPU, and the best of three: other work on the machine is not what is measured.
TIMED = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
{code}
spent = time.process_time() - start
print(json.dumps({{"s": spent, "modules": sorted(set(sys.modules) - before)}}))
"""

LIST_PLUGINS = """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as output:
    from minisgl.cli.main import main
    assert main(["plugins"]) == 0
assert "good" in output.getvalue()
"""


def test_importing_the_package_is_quick_and_does_nothing(run_python: RunPython) -> None:
    runs = [run_python(TIMED.format(code="import minisgl"), "acme-good") for _ in range(3)]
    assert min(run["s"] for run in runs) < 0.3
    assert not HEAVY.intersection(runs[0]["modules"])
    assert not any(name.startswith(("acme", "minisgl.")) for name in runs[0]["modules"])


def test_listing_plugins_is_quick_and_imports_nothing_heavy(run_python: RunPython) -> None:
    runs = [run_python(TIMED.format(code=LIST_PLUGINS), "acme-good") for _ in range(3)]
    assert min(run["s"] for run in runs) < 1.0
    assert not (HEAVY - {"yaml"}).intersection(runs[0]["modules"])
    assert "acme_good_backend" not in runs[0]["modules"]


@pytest.mark.parametrize(
    "module", ["minisgl.plugin.manager", "minisgl.plugin.hooks", "minisgl.config.load"]
)
def test_bootstrap_needs_no_heavy_library(run_python: RunPython, module: str) -> None:
    run = run_python(TIMED.format(code=f"import {module}"))
    assert not (HEAVY - {"yaml"}).intersection(run["modules"])


def test_the_command_deals_with_interrupts_before_it_imports_anything_else(
    run_python: RunPython,
) -> None:
    run = run_python(TIMED.format(code="import minisgl.cli.main"))
    assert [name for name in run["modules"] if name != "__future__"] == [
        "minisgl",
        "minisgl.cli",
        "minisgl.cli.main",
        "minisgl.cli.quiet_start",
    ]
