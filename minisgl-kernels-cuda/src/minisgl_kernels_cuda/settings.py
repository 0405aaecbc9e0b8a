"""The settings of ``cuda``, and where NVRTC and the compiled kernels are looked for."""

from __future__ import annotations

import ctypes.util
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from pydantic import Field

from minisgl.config.fields import Bytes, SettingsSection

# Distributions that bring NVRTC, of CUDA 13 and 12.
_NVRTC_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")

_NCCL_DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
NCCL_SONAME = "libnccl.so.2"


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
    reduce_at_once_bytes: Bytes | None = Field(
        default=None,
        ge=0,
        le=2**30,
        description="Largest all-reduce over GPUs of one host, in bytes, in which each rank sends "
        "everything to all others, fused with the norm behind it; auto: by the number of ranks. "
        "Read by the collectives.",
    )
    reduce_by_parts_bytes: Bytes | None = Field(
        default=None,
        ge=0,
        le=2**30,
        description="Largest all-reduce, above that, in which each rank sums a part; beyond it is "
        "NCCL, and 0 leaves all to NCCL; auto: by the number of ranks. Read by the collectives.",
    )
    linear_rows: int = Field(
        default=128,
        ge=0,
        le=128,
        description="Most rows for which products with weights use these kernels, where they were "
        "measured to be quicker than the library's; 0 never. Read when weights are packed.",
    )
    linear_many: Literal["auto", "off"] = Field(
        default="auto",
        description="The kernels of products with more than 128 rows, as of a prefill or of a "
        "large batch: on compute capability 9.0, where they were measured to be no slower than "
        "the library's, and cuBLASLt for long weights with 33 to 128 rows; off: neither. Read "
        "when weights are packed.",
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


def installed_nccl() -> Path | None:
    """Return the NCCL library that a distribution brings, as those of torch for CUDA do."""
    for name in _NCCL_DISTRIBUTIONS:
        try:
            found = Path(str(distribution(name).locate_file(f"nvidia/nccl/lib/{NCCL_SONAME}")))
        except PackageNotFoundError:
            continue
        if found.exists():
            return found
    return None


def has_nccl() -> bool:
    """Whether NCCL is installed, as a package or on the system."""
    return installed_nccl() is not None or ctypes.util.find_library("nccl") is not None
