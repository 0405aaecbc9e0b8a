"""The entry points of the documentation, with the module that the block behind them holds."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.core.cli.new_plugins import seeing
from tests.docs.doc_blocks import Block, all_blocks, blocks


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_what_an_entry_point_names_is_listed_and_works(block: Block, tmp_path: Path) -> None:
    (group,) = tomllib.loads(block.text)["project"]["entry-points"].items()
    write_distribution(tmp_path, group, module_behind(block).text)
    command = [sys.executable, "-m", "minisgl", "plugins", "--json", "--device", "cuda"]
    run = subprocess.run(
        command, env=seeing(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["failures"] == []
    listed = [each for each in document["backends"] + document["hooks"] if is_ours(each)]
    assert [each["name"] for each in listed] == list(group[1])


def module_behind(block: Block) -> Block:
    """Return the Python block that follows another one."""
    behind = [b for b in blocks(block.document) if b.language == "python" and b.line > block.line]
    return behind[0]


def write_distribution(folder: Path, group: tuple[str, dict[str, str]], module: str) -> None:
    """Write, as if it were installed, a distribution whose entry points lead to one module."""
    info = folder / "documented-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: documented\nVersion: 1.0\n")
    lines = [f"[{group[0]}]", *(f"{name} = {value}" for name, value in group[1].items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for value in group[1].values():
        place = folder.joinpath(*value.partition(":")[0].split(".")).with_suffix(".py")
        place.parent.mkdir()
        place.write_text(module)


def is_ours(row: dict[str, object]) -> bool:
    return row["distribution"] == "documented"
