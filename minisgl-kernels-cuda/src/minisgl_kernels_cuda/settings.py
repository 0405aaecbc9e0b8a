"""The settings of ``cuda``, and where NVRTC and the compiled kernels are looked for."""

from __future__ import annotations

import ctypes.util
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from pydantic import Field

from minisgl.config.fields import SettingsSection

# Distributions that bring NVRTC, of CUDA 13 and 12.
_NVRTC_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


class CudaKernelSettings(SettingsSection):
    """How the kernels are compiled and launched (``--cuda.…``)."""

    cache_dir: str = Field(
        default="",
        max_length=4096,
        description="Folder of compiled kernels; empty: minisgl/kernels in the user's cache "
        "folder. Read when the kernels are loaded.",
    )
    pdl: Literal["auto", "off"] = Field(
        default="auto",
        description="Programmatic dependent launch: a kernel starts before the one in front of it "
        "has ended, which hides launch gaps; auto: on from compute capability 9.0. "
        "Read when the kernels are loaded.",
    )
    linear_rows: int = Field(
        default=16,
        ge=0,
        le=16,
        description="Most rows for which products with weights use these kernels, where they were "
        "measured to be quicker than the library's; 0 never. Read when weights are packed.",
    )


def cache_folder(setting: str) -> Path:
    """Return the folder of compiled kernels.

    Args:
        setting: `CudaKernelSettings.cache_dir`.
    """
    if setting:
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minisgl" / "kernels"


def has_nvrtc() -> bool:
    """Whether the run-time compiler is installed, as a package or with a CUDA toolkit."""
    for name in _NVRTC_DISTRIBUTIONS:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    in_toolkit = any(Path(home).glob("lib*/libnvrtc.so*"))
    return in_toolkit or ctypes.util.find_library("nvrtc") is not None
