"""The model source for the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from minisgl.errors import ModelError
from minisgl.weights.contract import ModelSource, SourceConfig
from minisgl.weights.local import FolderFiles

WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken")
UNWANTED_FILES = ("consolidated*", "original/*", "onnx/*")

_MAX_ID_LEN = 96  # the hub's own limit
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class HubSource(ModelSource):
    """Opens models by their hub id, ``owner/name``; what was fetched once is kept and reused."""

    def __init__(self, config: SourceConfig) -> None:
        """Keep the revision to fetch."""
        self._revision = config.revision

    def accepts(self, model: str) -> bool:
        """Return whether ``model`` is an id and cannot be meant as a path.

        ``models/Qwen3-0.6B`` is shaped like an id too; where there is a folder ``models``, it is
        taken as a path, so that a typing error never turns into a download.
        """
        return is_hub_id(model) and not Path(model.partition("/")[0]).exists()

    def open(self, model: str) -> FolderFiles:
        """Fetch what is missing, and open the copy.

        ``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and the library's other variables count.
        """
        if not is_hub_id(model):
            raise ModelError(f"--model {model}: a hub id is owner/name")
        # Takes most of a second, which a model on the disk must not pay for.
        from huggingface_hub import snapshot_download  # noqa: PLC0415

        try:
            folder = snapshot_download(
                model,
                revision=self._revision,
                allow_patterns=list(WANTED_FILES),
                ignore_patterns=list(UNWANTED_FILES),
            )
        # The hub's own errors, and those of whichever HTTP library it uses, derive from these.
        except (OSError, ValueError) as error:
            raise ModelError(_explain(model, self._revision, error)) from error
        return FolderFiles(Path(folder), model)


def is_hub_id(model: str) -> bool:
    """Return whether a string is shaped like ``owner/name``."""
    is_id = len(model) <= _MAX_ID_LEN and _ID.fullmatch(model) is not None
    return is_id and not model.endswith((".git", ".ipynb"))


def _explain(model: str, revision: str | None, error: Exception) -> str:
    """Say what went wrong and what would help, by the name of the hub's error."""
    reasons = {
        "RepositoryNotFoundError": "there is no such model, or it is private and HF_TOKEN is unset",
        "GatedRepoError": "it is gated: accept its terms on its page and set HF_TOKEN",
        "RevisionNotFoundError": f"it has no revision {revision!r}",
        "LocalEntryNotFoundError": "the hub cannot be reached and there is no local copy",
        "IncompleteSnapshotError": "the hub cannot be reached and the local copy is incomplete",
        "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and there is no local copy",
    }
    kinds = [kind.__name__ for kind in type(error).__mro__]
    # Gated is a kind of not-found, so the most specific name is looked up first.
    known = next((reasons[kind] for kind in kinds if kind in reasons), None)
    what = known or (str(error).strip().splitlines() or [repr(error)])[0]
    where = f"there is no local folder {Path.cwd() / model} either"
    return f"--model {model}: from the Hugging Face hub: {what}; {where}"
