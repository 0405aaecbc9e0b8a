"""The generations of FlashAttention: which are installed, and what each can do.

Nothing is imported to find out: FlashAttention 2 loads a compiled CUDA library on import, and
FlashAttention 4 a whole compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minisgl.plugin.spec import Capabilities, Phase, ProbeContext

DTYPES = ("float16", "bfloat16")
HEAD_DIMS = tuple(range(8, 257, 8))
_FA4_BLACKWELL_HEAD_DIMS = (*range(8, 129, 8), 256)
_FA2_PAGE_MULTIPLE = 256


@dataclass(frozen=True, slots=True)
class Generation:
    """One way to call FlashAttention.

    Attributes:
        version: ``"2"``, ``"3"`` or ``"4"``.
        module: What is imported to call it.
        package: What a user installs.
        page_multiple: Page sizes are multiples of this.
        rank_on: Compute-capability majors that it serves, the better the higher the value.
        is_installed: Looks for it without importing it.
    """

    version: str
    module: str
    package: str
    page_multiple: int
    rank_on: dict[int, int]
    is_installed: Callable[[], bool]

    def head_dims(self, sm: int) -> tuple[int, ...]:
        """Return the head dimensions that it serves on a GPU."""
        if self.version == "4" and sm >= 100:
            return _FA4_BLACKWELL_HEAD_DIMS
        return HEAD_DIMS

    def capabilities(self, sm: int) -> Capabilities:
        """Return what attention by this generation can do on a GPU."""
        return Capabilities(
            page_multiple=self.page_multiple, dtypes=DTYPES, head_dims=self.head_dims(sm)
        )

    def priority(self, phase: Phase | None, sm: int) -> int:
        """Return how strongly ``auto`` should want it; FlashInfer has 40 prefill, 50 decode.

        Prefill by 3 is quicker than FlashInfer's. So is that of 4, but on compute capability 9.0
        it gains 7 % with long prompts, loses 2 ms with short ones (a call costs the host 0.1 ms),
        and takes 15 s longer to start: whoever wants it there names it. In decode 4 does not
        split long sequences on 9.0: 90 against 14 us for one of 8192 tokens.
        """
        prefill = {"2": 30, "3": 60, "4": 35 if sm < 100 else 60}[self.version]
        decode = {"2": 35, "3": 45, "4": 30 if sm < 100 else 45}[self.version]
        if phase is None:
            return min(prefill, decode)
        return prefill if phase == "prefill" else decode


def has_file(package: str, *path: str) -> bool:
    """Whether a top-level package is installed and has a file, without importing either."""
    spec = find_spec(package)
    locations = None if spec is None else spec.submodule_search_locations
    return any(Path(location, *path).is_file() for location in locations or ())


def generations() -> tuple[Generation, ...]:
    """Return every generation that this plugin can call."""
    return (
        Generation(
            version="3",
            module="flash_attn_interface",
            package="FlashAttention-3 (the hopper folder of the flash-attention repository)",
            page_multiple=1,
            rank_on={8: 1, 9: 3},
            is_installed=lambda: find_spec("flash_attn_interface") is not None,
        ),
        Generation(
            version="3",
            module="sgl_kernel.flash_attn",
            package="sglang-kernel",
            page_multiple=1,
            rank_on={8: 1, 9: 3},
            is_installed=lambda: has_file("sgl_kernel", "flash_attn.py"),
        ),
        Generation(
            version="4",
            module="flash_attn.cute",
            package="flash-attn-4",
            page_multiple=1,
            rank_on={9: 2, 10: 3, 11: 3},
            is_installed=lambda: has_file("flash_attn", "cute", "interface.py"),
        ),
        Generation(
            version="2",
            module="flash_attn.flash_attn_interface",
            package="flash-attn",
            page_multiple=_FA2_PAGE_MULTIPLE,
            rank_on={8: 2, 9: 1, 10: 1, 12: 1},
            is_installed=lambda: has_file("flash_attn", "flash_attn_interface.py"),
        ),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The generation to use, or why there is none.

    Attributes:
        generation: The best one; ``None`` where nothing serves.
        reason: What was chosen, or what is missing.
    """

    generation: Generation | None
    reason: str


def choose(context: ProbeContext, version: str = "auto") -> Choice:
    """Choose the best installed generation for a GPU and model.

    Args:
        context: The machine and model; a page size in it rules out what cannot have it.
        version: ``"auto"`` or the one generation that is wanted.
    """
    if context.device != "cuda" or context.sm is None:
        return Choice(None, "needs an NVIDIA GPU of compute capability 8.0 or up")
    sm = context.sm
    if context.dtype not in DTYPES:
        return Choice(None, f"serves float16 and bfloat16, the model is {context.dtype}")
    wanted = [each for each in generations() if version in ("auto", each.version)]
    fitting = [each for each in wanted if sm // 10 in each.rank_on]
    if not fitting:
        return Choice(
            None, f"FlashAttention{_named(version)} does not run on compute capability {sm / 10}"
        )
    installed = [each for each in fitting if each.is_installed()]
    if not installed:
        packages = " or ".join(each.package for each in fitting)
        return Choice(None, f"no FlashAttention for this GPU is installed: install {packages}")
    able = [each for each in installed if context.head_dim in (None, *each.head_dims(sm))]
    if not able:
        return Choice(
            None, f"head dimension {context.head_dim}: allowed are multiples of 8 up to 256"
        )
    paged = [each for each in able if (context.page_size or 0) % each.page_multiple == 0]
    # Where no page size is right, the best one is reported, and with it what it wants.
    best = max(paged or able, key=lambda each: each.rank_on[sm // 10])
    return Choice(best, f"FlashAttention {best.version} by {best.module}")


def _named(version: str) -> str:
    return "" if version == "auto" else f" {version}"
