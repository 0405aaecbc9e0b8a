"""The model source for ModelScope; needs the extra ``minisgl-core[modelscope]``."""

from __future__ import annotations

from pathlib import Path

from minisgl.errors import ModelError
from minisgl.weights.contract import ModelSource, SourceConfig
from minisgl.weights.hub import UNWANTED_FILES, WANTED_FILES, is_hub_id
from minisgl.weights.local import FolderFiles


class ModelScopeSource(ModelSource):
    """Opens models by their ModelScope id, ``owner/name``."""

    def __init__(self, config: SourceConfig) -> None:
        """Keep the revision to fetch."""
        self._revision = config.revision

    def accepts(self, model: str) -> bool:
        """Return False: its ids look like those of the hub, so it is only used when named."""
        del model
        return False

    def open(self, model: str) -> FolderFiles:
        """Fetch what is missing, and open the copy; ``MODELSCOPE_CACHE`` says where that is."""
        if not is_hub_id(model):
            raise ModelError(f"--model {model}: a ModelScope id is owner/name")
        try:
            # Optional, so it is imported only when somebody names this source.
            from modelscope import snapshot_download  # noqa: PLC0415
        except ImportError as error:
            raise ModelError(
                f"--model-source modelscope: cannot be imported ({error}); "
                "pip install 'minisgl-core[modelscope]'"
            ) from error
        try:
            folder = snapshot_download(
                model,
                revision=self._revision,
                allow_patterns=list(WANTED_FILES),
                ignore_patterns=list(UNWANTED_FILES),
            )
        # The library raises plain exceptions of many kinds when a download fails.
        except Exception as error:
            raise ModelError(f"--model {model}: from ModelScope: {error}") from error
        return FolderFiles(Path(folder), model)
