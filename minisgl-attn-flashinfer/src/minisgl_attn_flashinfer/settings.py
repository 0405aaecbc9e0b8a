"""The settings of ``fi``, and the environment variables of FlashInfer's own build system."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from minisgl.config.fields import SettingsSection


class FlashInferSettings(SettingsSection):
    """How ``fi`` attends (``--fi.…``)."""

    decode_tensor_cores: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Kernel of decode: on tensor cores, or on CUDA cores; auto uses tensor cores "
        "from 4 query heads per KV head, and wherever CUDA cores do not serve that ratio. "
        "Read by the decode planner.",
    )
    prefill_backend: Literal["auto", "fa2", "fa3"] = Field(
        default="auto",
        description="Kernel of prefill: fa2 for every GPU, fa3 for compute capability 9.0; auto "
        "uses fa3 there if its module is already built, so that no start waits for a compiler. "
        "Read by the prefill planner.",
    )
    workspace_mib: int = Field(
        default=256,
        ge=16,
        le=8192,
        description="Device memory for partial results of split sequences, in MiB. "
        "Read by both planners.",
    )


@dataclass(frozen=True, slots=True)
class BuildEnvironment:
    """What decides whether FlashInfer can compile, and where it keeps what it compiled.

    Attributes:
        nvcc: The CUDA compiler, or ``None``.
        cache: Folder of modules that were compiled at an earlier first use.
        is_jit_disabled: Whether the user forbade compiling.
    """

    nvcc: Path | None
    cache: Path
    is_jit_disabled: bool


def read_build_environment() -> BuildEnvironment:
    """Read the variables by the rules of FlashInfer itself.

    Returns:
        What was found; nothing is imported and no GPU is touched.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = os.environ.get("FLASHINFER_NVCC") or (
        f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    )
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    return BuildEnvironment(
        nvcc=Path(found) if Path(found).is_file() else None,
        cache=(Path(base) if base else Path.home()) / ".cache" / "flashinfer",
        is_jit_disabled=bool(os.environ.get("FLASHINFER_DISABLE_JIT")),
    )
