"""The CUDA sources: which kernels each has, and how their arguments lie in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol

import torch

from minisgl.errors import PluginError
from minisgl_kernels_cuda.linear_plans import BATCH_KERNELS

MACROS: Mapping[torch.dtype, int] = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""Value of ``MINISGL_DTYPE`` for each element type."""

STATIC_SHARED_BYTES = 20 * 1024
"""A bound of the shared memory that sources declare which take more at the launch."""

MATRIX_MAP_BYTES = 128
"""Of a matrix as kernels take it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One source file.

    Attributes:
        name: Of the file, without its suffix.
        entries: Argument layout of each kernel by name, in the letters of `struct` (native
            alignment, which is CUDA's), one for each parameter of the kernel: P a pointer, q
            int64, i int32, f float32; and in front of these, structures as bytes, such as 128s a
            matrix (`Loader.matrix_map`).
        max_shared_bytes: Most shared memory that a launch asks for.
        static_shared_bytes: A bound of what the source declares beside that.
        only_arch: The one architecture that has its instructions, empty for all.
    """

    name: str
    entries: Mapping[str, str]
    max_shared_bytes: int = 0
    static_shared_bytes: int = STATIC_SHARED_BYTES
    only_arch: str = ""


@dataclass(frozen=True, slots=True)
class DeviceSize:
    """What plans depend on.

    Attributes:
        num_sms: Multiprocessors.
        max_shared_bytes: Most shared memory of one block.
        arch: That kernels are compiled for, such as ``sm_90a``.
    """

    num_sms: int
    max_shared_bytes: int
    arch: str


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """A tensor ``[num_tokens, num_heads, head_dim]`` of 16-bit elements.

    Attributes:
        num_tokens: At least 1.
        num_heads: They follow each other.
        head_dim: A multiple of 64, contiguous.
        token_stride: Elements from one token to the next, a multiple of 8.
    """

    num_tokens: int
    num_heads: int
    head_dim: int
    token_stride: int


class Launch(Protocol):
    """A compiled kernel."""

    def __call__(
        self,
        grid: tuple[int, int],
        block: tuple[int, int],
        *args: float | bytes,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """Submit it to the current stream.

        Args:
            grid: Blocks in x and y.
            block: Threads of a block in x and y.
            args: By the layout of the kernel; pointers as addresses, 0 for none, structures as
                their bytes, matrices as `Loader.matrix_map` describes them.
            shared_bytes: Shared memory of a block beside what the source declares.
            cluster: Blocks side by side in x that run together and read each other's shared
                memory; more than 1 from compute capability 9.0.
        """


class Loader(ABC):
    """Turns units into kernels: on a device, or in a test on a simulator."""

    @abstractmethod
    def load(self, unit: Unit, dtype: torch.dtype) -> Mapping[str, Launch]:
        """Compile a unit for an element type, if need be, and return its kernels by name."""

    @abstractmethod
    def matrix_map(self, address: int, num_rows: int, num_columns: int, box_rows: int) -> bytes:
        """Describe a matrix to kernels that copy boxes of it; from compute capability 9.0.

        Args:
            address: Of its first element, a multiple of 16 bytes. It has 16-bit elements and
                contiguous rows.
            num_rows: At least 1.
            num_columns: A multiple of 8.
            box_rows: Rows of a box, at most 256; it has 64 columns.

        Returns:
            `MATRIX_MAP_BYTES`, which hold as long as the matrix stays where it is.
        """

    @abstractmethod
    def heads_map(self, address: int, shape: HeadsShape, box: tuple[int, int]) -> bytes:
        """Describe heads of tokens to kernels that copy boxes of them; likewise.

        Args:
            address: Of the first element, a multiple of 16 bytes.
            shape: Of the tensor.
            box: Tokens and heads of a box, at most 256 each; it has 64 elements of a head.
        """


def piece_size(dtype: torch.dtype) -> int:
    """Return how many elements 16 bytes hold."""
    return 16 // dtype.itemsize


def read_sources() -> dict[str, str]:
    """Return the text of every source file by its name."""
    folder = files("minisgl_kernels_cuda") / "sources"
    return {
        f.name: f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith((".cu", ".cuh"))
    }


def macro_of(dtype: torch.dtype) -> int:
    """Return the value of ``MINISGL_DTYPE``.

    Raises:
        PluginError: No kernel serves the dtype.
    """
    if dtype not in MACROS:
        known = ", ".join(str(d).removeprefix("torch.") for d in MACROS)
        raise PluginError(f"--kernels cuda: dtype {dtype} is not served; allowed: {known}")
    return MACROS[dtype]


NORM = Unit(
    "norm",
    {
        **{f"rms_norm_{p}": "PPPqqiiif" for p in (1, 2, 4)},
        **{f"fused_add_rms_norm_{p}": "PPPiif" for p in (1, 2, 4)},
    },
)
ACTIVATION = Unit(
    "activation", dict.fromkeys(("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"), "PPi")
)
MEMORY = Unit("memory", {"embedding": "PPPiii", "store_kv": "PPPPPqqi"})
QKV = Unit(
    "qkv",
    dict.fromkeys(("qkv_64", "qkv_128", "qkv_256", "qkv_any"), "PPPPPPPPqiiiiif"),
)
SAMPLE = Unit("sample", {"sample_tiles": "PqiiPPP", "sample_rows": "PqiiPPPPPPPPP"})
LINEAR = Unit(
    "linear",
    {f"linear_{groups}_{columns}": "PPPPiiii" for groups in (1, 2) for columns in (1, 2)},
    max_shared_bytes=128 * 1024,
)
LINEAR_BATCH = Unit(
    "linear_batch",
    {f"linear_batch_{rows}_{groups}": "PPPPiiiiiii" for rows, groups in BATCH_KERNELS},
    max_shared_bytes=207 * 1024,
    only_arch="sm_90a",
)
LINEAR_MANY = Unit(
    "linear_many",
    {f"linear_many_{name}": "128s128s128sPiii" for name in ("plain", "silu", "gelu", "gelu_tanh")},
    # Four steps of 128 rows and 256 outputs, a tile's results, and who has arrived.
    max_shared_bytes=4 * (128 + 256) * 128 + 128 * 256 + 64,
    static_shared_bytes=0,
    only_arch="sm_90a",
)
LINEAR_WIDE = Unit(
    "linear_wide",
    {"linear_wide": "128s128sPPiii"},
    # Five steps of 192 rows, 72 gates and as many ups, and who has arrived.
    max_shared_bytes=5 * (192 + 2 * 72) * 128 + 128,
    static_shared_bytes=0,
    only_arch="sm_90a",
)
ATTENTION = Unit(
    "attention",
    {f"attention_{dim}_{warps}": "PPPPPPPPPqiiiiiiiif" for dim in (64, 128) for warps in (4, 8)},
    max_shared_bytes=207 * 1024,
)
ATTENTION_PREFILL = Unit(
    "attention_prefill",
    {f"attention_prefill_{dim}": "128s128s128sPPPPPPPPiiiiiiif" for dim in (64, 128)},
    # Queries of two jobs, two tiles of 128 keys and two of values; who has arrived, and the jobs.
    max_shared_bytes=(2 + 2 + 2) * 128 * 128 * 2 + 256,
    static_shared_bytes=0,
    only_arch="sm_90a",
)
ALLREDUCE = Unit(
    "allreduce",
    {
        # The peers and the patience of peers.cuh, each a structure in one argument; and more.
        f"{name}_{ranks}": "64s16s" + layout
        for ranks in (2, 4, 8)
        for name, layout in (
            ("sum_at_once", "Pqii"),
            ("sum_by_parts", "Pqii"),
            ("sum_add_norm", "PPPiiif"),
        )
    },
)
UNITS = (
    ALLREDUCE, ATTENTION, ATTENTION_PREFILL, NORM, ACTIVATION, MEMORY, QKV, SAMPLE,
    LINEAR, LINEAR_BATCH, LINEAR_MANY, LINEAR_WIDE,
)  # fmt: skip
