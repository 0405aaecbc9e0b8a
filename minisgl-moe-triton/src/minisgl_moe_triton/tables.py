"""Tables of tuned tiles: those of the package, and those that the user's machine made."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from minisgl.errors import SettingsError
from minisgl_moe_triton.plan import LayerShape, Step, default_steps, fit_steps
from minisgl_moe_triton.settings import cache_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TunedShape:
    """The steps of one shape, by rising ``max_tokens``; the last serves everything above it."""

    shape: LayerShape
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class TuningTable:
    """What was tuned on one device.

    Attributes:
        device: Name of the GPU.
        shapes: One entry per shape.
    """

    device: str
    shapes: tuple[TunedShape, ...]

    def find(self, shape: LayerShape) -> tuple[Step, ...]:
        """Return the steps of a shape, or none."""
        return next((entry.steps for entry in self.shapes if entry.shape == shape), ())

    def with_shape(self, tuned: TunedShape) -> TuningTable:
        """Return a table in which an entry is added or replaced."""
        others = [entry for entry in self.shapes if entry.shape != tuned.shape]
        return TuningTable(self.device, (*others, tuned))


def read_table(path: Path) -> TuningTable:
    """Read a table.

    Raises:
        SettingsError: It cannot be read, or is not a table.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"tuning table {path}: {str(error.strerror).lower()}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"tuning table {path}: is not UTF-8 text: {error}") from error
    return _parse(text, str(path))


def write_table(path: Path, table: TuningTable) -> None:
    """Write a table, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(table), indent=1) + "\n")


def user_table_path(device: str) -> Path:
    """Return where the user's own table of a device is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder() / f"{name}.json"


def find_steps(
    shape: LayerShape, device: str, sm: int | None, table: Path | None = None
) -> tuple[Step, ...]:
    """Find tiles: in the table that the user named, in the user's own, in ours, or by rule.

    Args:
        shape: The layer.
        device: Name of the GPU.
        sm: Its compute capability, or ``None`` without one.
        table: The table that the user named.

    Raises:
        SettingsError: A table is damaged.
    """
    paths = [user_table_path(device)] if table is None else [table]
    for path in paths:
        if table is not None or path.is_file():
            found = read_table(path).find(shape)
            if found:
                logger.info("fused MoE: tiles from %s", path)
                return fit_steps(found, shape, sm)
    found = package_table(sm).find(shape)
    source = f"the package's table for compute capability {sm}" if found else "the general rule"
    logger.info("fused MoE: tiles from %s; `minisgl bench moe --tune` makes a table", source)
    return fit_steps(found or default_steps(shape, sm), shape, sm)


def package_table(sm: int | None) -> TuningTable:
    """Return our table for a compute capability; an empty one if there is none."""
    file = files("minisgl_moe_triton") / "tables" / f"sm{sm}.json"
    return _parse(file.read_text(), file.name) if file.is_file() else TuningTable("", ())


def _parse(text: str, name: str) -> TuningTable:
    try:
        table = TypeAdapter(TuningTable).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise SettingsError(f"tuning table {name}: {where}: {first['msg'].lower()}") from error
    for entry in table.shapes:
        _check(entry, name)
    return table


def _check(entry: TunedShape, name: str) -> None:
    """Refuse what the kernels cannot be compiled for.

    Raises:
        SettingsError: A value is not allowed.
    """
    if not entry.steps:
        raise SettingsError(f"tuning table {name}: steps: must not be empty")
    for step in entry.steps:
        tiles = (step.gate_up, step.down)
        sizes = [step.block_m]
        sizes += [size for tile in tiles for size in (tile.block_n, tile.block_k, tile.num_warps)]
        for size in sizes:
            if size < 1 or size & (size - 1):
                raise SettingsError(f"tuning table {name}: {size}: must be a power of two")
        if step.block_m != 1 and min(sizes[0], *(tile.block_n for tile in tiles)) < 16:
            raise SettingsError(f"tuning table {name}: block_m and block_n: must be 16 or more")
        if step.block_m == 1 and step.max_tokens != 1:
            raise SettingsError(f"tuning table {name}: block_m 1: only with max_tokens 1")
