"""Which of FlashInfer's compiled modules are at hand, found out without importing it.

FlashInfer compiles a module per op, dtype and head dimension at its first use. A machine without
a CUDA compiler can still run what was built before: by the ``flashinfer-jit-cache`` wheel, by a
folder of prebuilt modules, or by an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from minisgl_attn_flashinfer.settings import BuildEnvironment, read_build_environment

DISTRIBUTION = "flashinfer-python"
AttentionKind = Literal["decode", "prefill_fa2", "prefill_fa3"]
_SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Installation:
    """An installed FlashInfer.

    Attributes:
        version: Of the distribution, as numbers.
        folders: Where its compiled modules may lie, one folder per module.
        build: What it would compile with.
    """

    version: tuple[int, ...]
    folders: tuple[Path, ...]
    build: BuildEnvironment

    @property
    def can_compile(self) -> bool:
        """Whether a module that is not there yet can be made."""
        return self.build.nvcc is not None and not self.build.is_jit_disabled

    def has_module(self, pattern: str) -> bool:
        """Whether a module is built whose name matches a shell pattern."""
        return any(any(folder.glob(f"{pattern}/*.so")) for folder in self.folders)

    def can_load(self, pattern: str) -> bool:
        """Whether a module is built or can be."""
        return self.can_compile or self.has_module(pattern)


def find_installation() -> Installation | None:
    """Look for FlashInfer; ``None`` where it is not installed."""
    spec = find_spec("flashinfer")
    locations = None if spec is None else spec.submodule_search_locations
    if not locations:
        return None
    try:
        text = version(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    build = read_build_environment()
    prebuilt = [Path(location) / "data" / "aot" for location in locations]
    return Installation(
        version=_numbers(text),
        folders=(*prebuilt, *_wheel_folders(), *build.cache.glob(f"{text}/*/cached_ops")),
        build=build,
    )


def attention_module(
    kind: AttentionKind, dtype: str, head_dim: int | None, has_window: bool = False
) -> str:
    """Return a pattern of the name of an attention module.

    Args:
        kind: Which; decode on tensor cores uses ``prefill_fa2``.
        dtype: Torch's name of the dtype of q and KV.
        head_dim: Of q, k and v; ``None`` for any.
        has_window: Whether it serves a sliding window.
    """
    short, dim = _SHORT_DTYPES.get(dtype, dtype), head_dim or "*"
    tail = {"decode": "", "prefill_fa2": "_f16qk_False", "prefill_fa3": "_f16qk_False_sm90"}[kind]
    return (
        f"batch_{kind.partition('_')[0]}_with_kv_cache_dtype_q_{short}_dtype_kv_{short}"
        f"_dtype_o_{short}_dtype_idx_i32_head_dim_qk_{dim}_head_dim_vo_{dim}_posenc_0"
        f"_use_swa_{has_window}_use_logits_cap_False{tail}"
    )


def _wheel_folders() -> Iterator[Path]:
    """Yield the folder of the companion wheel with prebuilt modules."""
    spec = find_spec("flashinfer_jit_cache")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        yield Path(location) / "jit_cache"


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version, ``0.6.4.post1`` as ``(0, 6, 4)``."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
