"""What pytest loads wherever the core is installed; it does nothing for other people's tests.

``--backend`` is too common a flag to add to every pytest run on a machine, so the real plugin is
loaded only when the command line names `minisgl.testing`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

PACKAGE = "minisgl.testing"


def pytest_load_initial_conftests(early_config: pytest.Config, args: Sequence[str]) -> None:
    """Load the plugin of the conformance suites when they are asked for."""
    if any(arg == PACKAGE or arg.startswith((f"{PACKAGE}.", f"{PACKAGE}:")) for arg in args):
        early_config.pluginmanager.import_plugin(f"{PACKAGE}.plugin")
