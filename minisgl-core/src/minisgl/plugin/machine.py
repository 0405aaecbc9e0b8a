"""What the machine is, read without importing torch: enough for probes in ``minisgl plugins``.

An engine asks torch (`minisgl.device`). Listing plugins must not, because that import alone takes
longer than listing may, so the driver's management library is asked directly; unlike CUDA itself
it leaves no state behind in the process.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_MAX_NAME = 96


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that ``--device auto`` would pick.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        sm: Compute capability as ``major * 10 + minor``, or ``None``.
        gpu: Name of the GPU, or empty.
        note: What keeps a GPU that is there from being used, or empty.
    """

    device: str = "cpu"
    sm: int | None = None
    gpu: str = ""
    note: str = ""

    @property
    def default_dtype(self) -> str:
        """What ``--dtype auto`` is for most models here."""
        return "bfloat16" if self.device == "cuda" else "float32"


def read_machine(wanted: str = "auto") -> Machine:
    """Look at the first visible GPU, or the one that ``wanted`` names.

    Args:
        wanted: As ``--device``: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    """
    if wanted == "cpu":
        return Machine()
    index = int(wanted.partition(":")[2] or 0)
    gpu = _query_gpu(index)
    if gpu is None:
        return Machine(note=_why_unknown(index) if wanted != "auto" else "")
    if not _torch_cuda_version():
        return Machine(gpu=gpu[1], note="the installed torch is built without CUDA")
    return Machine(device="cuda", sm=gpu[0], gpu=gpu[1])


def torch_folder() -> Path | None:
    """Return where torch is installed, without importing it."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _torch_cuda_version() -> str:
    """Return the CUDA version that torch was built for, or nothing."""
    folder = torch_folder()
    try:
        text = (folder / "version.py").read_text() if folder is not None else ""
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _why_unknown(index: int) -> str:
    """Say why nothing is known of a GPU that was asked for."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return f"no NVIDIA GPU {index} is found"
    entries = [entry.strip() for entry in visible.split(",")]
    if index < len(entries) and entries[index].startswith(("GPU-", "MIG-")):
        return f"CUDA_VISIBLE_DEVICES names GPU {index} by UUID, which is not looked up here"
    return f"no NVIDIA GPU {index} is found among CUDA_VISIBLE_DEVICES={visible}"


def _query_gpu(index: int) -> tuple[int, str] | None:
    """Return compute capability and name of a visible GPU by the driver's management library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",")]
        if index >= len(entries) or not entries[index].isdigit():
            return None  # hidden, or named by UUID: then say nothing rather than something wrong
        index = int(entries[index])
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        return _read_gpu(nvml, index)
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: ctypes.CDLL, index: int) -> tuple[int, str] | None:
    handle = ctypes.c_void_p()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_MAX_NAME)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    status = nvml.nvmlDeviceGetCudaComputeCapability(
        handle, ctypes.byref(major), ctypes.byref(minor)
    )
    if status != 0:
        return None
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_MAX_NAME))
    return major.value * 10 + minor.value, name.value.decode(errors="replace")
