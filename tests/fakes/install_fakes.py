"""Puts the fakes where imports and probes find them: as packages in a folder on ``sys.path``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FLASHINFER = {
    "flashinfer/__init__.py": "from tests.fakes.fake_flashinfer_attention import *",
    "flashinfer/decode.py": (
        "from tests.fakes.fake_flashinfer_attention import *\n"
        "from tests.fakes.fake_flashinfer_more import trtllm_batch_decode_with_kv_cache"
    ),
    "flashinfer/prefill.py": "from tests.fakes.fake_flashinfer_attention import *",
    "flashinfer/norm.py": "from tests.fakes.fake_flashinfer_ops import *",
    "flashinfer/rope.py": "from tests.fakes.fake_flashinfer_ops import *",
    "flashinfer/activation.py": "from tests.fakes.fake_flashinfer_ops import *",
    "flashinfer/sampling.py": "from tests.fakes.fake_flashinfer_more import *",
    "flashinfer/fused_moe.py": "from tests.fakes.fake_flashinfer_more import *",
    "flashinfer_python-0.6.4.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.4\n"
    ),
}


def flash_attention(*versions: str) -> dict[str, str]:
    """Return the files of some generations of FlashAttention."""
    files = {}
    source = "from tests.fakes.fake_flash_attn import FlashAttention{0} as fake\n"
    one = source + "{1} = fake.{1}\n"
    if "2" in versions:
        files["flash_attn/flash_attn_interface.py"] = (
            one + "flash_attn_with_kvcache = fake.flash_attn_with_kvcache"
        ).format("2", "flash_attn_varlen_func")
    if "3" in versions:
        files["flash_attn_interface.py"] = one.format("3", "flash_attn_with_kvcache")
    if "sgl" in versions:
        files["sgl_kernel/flash_attn.py"] = one.format("3", "flash_attn_with_kvcache")
    if "4" in versions:
        files["flash_attn/cute/interface.py"] = ""
        files["flash_attn/cute/__init__.py"] = one.format("4", "flash_attn_varlen_func")
    return files


def write_packages(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of some packages to a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextmanager
def installed(folder: Path, files: Mapping[str, str]) -> Iterator[Path]:
    """Write the files to a folder that is importable for the duration.

    Everything that was imported meanwhile and could hold on to a fake is forgotten afterwards, so
    that tests on a real GPU in the same process import the real libraries.
    """
    write_packages(folder, files)
    _forget()
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        _forget()


def _forget() -> None:
    names = (
        "flashinfer",
        "flash_attn",
        "flash_attn_interface",
        "sgl_kernel",
        "minisgl_attn_flashinfer",
        "minisgl_attn_fa",
    )
    for module in list(sys.modules):
        if module.split(".")[0] in names:
            del sys.modules[module]
