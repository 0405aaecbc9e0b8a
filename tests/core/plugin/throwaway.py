"""Real distributions that exist for the tests only: built as wheels and installed by pip."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent


@dataclass(frozen=True)
class Throwaway:
    """One distribution: modules by file name, entry points by group."""

    name: str
    modules: dict[str, str]
    entry_points: dict[str, dict[str, str]]
    version: str = "1.0"
    removed: tuple[str, ...] = ()  # files that go missing after installation
    requires: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}"

    def build_wheel(self, folder: Path) -> Path:
        info = f"{self.stem}.dist-info"
        points = "\n".join(
            f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in names.items())
            for group, names in self.entry_points.items()
        )
        files = {name: dedent(text) for name, text in self.modules.items()}
        metadata = f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n"
        metadata += "".join(f"Requires-Dist: {text}\n" for text in self.requires)
        tag = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        files |= {f"{info}/METADATA": metadata, f"{info}/WHEEL": tag}
        files |= {f"{info}/entry_points.txt": points + "\n"}
        record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        wheel = folder / f"{self.stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in {**files, f"{info}/RECORD": record}.items():
                archive.writestr(name, text)
        return wheel


def install_all(throwaways: Sequence[Throwaway], folder: Path) -> dict[str, Path]:
    """Let pip install every wheel, then give each distribution a folder of its own."""
    wheels = [str(each.build_wheel(folder)) for each in throwaways]
    together = folder / "together"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(together)]
    subprocess.run([*pip, *options, *wheels], check=True)
    sites = {each.name: folder / each.name for each in throwaways}
    for each in throwaways:
        sites[each.name].mkdir()
        for entry in (*each.modules, f"{each.stem}.dist-info"):
            if entry not in each.removed:
                (together / entry).rename(sites[each.name] / entry)
    return sites
