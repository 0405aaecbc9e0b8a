"""Where ``--record`` writes to; apart from the recorder, so that it can be checked early."""

from __future__ import annotations

from pathlib import Path

from minisgl.config.load import Settings
from minisgl.config.sections import RecordSettings
from minisgl.errors import SettingsError


def record_path(settings: Settings) -> Path | None:
    """Return the file that takes a trace, or ``None`` where none is wanted.

    Raises:
        SettingsError: The file exists, its folder does not, or ``--record-prompts`` comes without
            ``--record``.
    """
    wanted = settings.section(RecordSettings)
    if wanted.record is None:
        if wanted.record_prompts:
            raise SettingsError("--record-prompts: goes with --record FILE")
        return None
    path = Path(wanted.record).expanduser()
    if path.exists():
        raise SettingsError(f"--record {path}: exists; name a file that does not")
    if not path.parent.is_dir():
        raise SettingsError(f"--record {path}: there is no folder {path.parent}")
    return path
