"""What this distribution registers: the MoE backend ``fused`` and the command ``bench moe``."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib.util import find_spec

from minisgl.plugin.commands import Subcommand
from minisgl.plugin.hookspecs import hookimpl
from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec, ProbeContext
from minisgl_moe_triton.settings import FusedSettings, is_interpreted

PRIORITY = 50
# Below the torch reference, so that `auto` never picks the interpreter.
INTERPRETED_PRIORITY = -1


def probe_moe(context: ProbeContext) -> Availability:
    """Say whether the kernels can run here."""
    if find_spec("triton") is None:
        return Availability(ok=False, reason="package triton is not installed: pip install triton")
    if context.device == "cpu":
        if is_interpreted():
            reason = "interpreted, very slow: for tests only"
            return Availability(ok=True, reason=reason, priority=INTERPRETED_PRIORITY)
        return Availability(
            ok=False,
            reason="needs an NVIDIA GPU of compute capability 8.0 or up; "
            "TRITON_INTERPRET=1 runs it on a CPU, for tests",
        )
    if context.device != "cuda" or context.sm is None:
        return Availability(ok=False, reason="needs an NVIDIA GPU of compute capability 8.0 or up")
    if context.sm < 80:
        return Availability(
            ok=False, reason=f"needs compute capability 8.0 or up, this GPU has {context.sm / 10}"
        )
    return Availability(ok=True, priority=PRIORITY)


@hookimpl
def minisgl_subcommands() -> list[Subcommand]:
    """Offer ``minisgl bench moe``."""
    return [
        Subcommand(
            name="bench moe",
            summary="time the fused MoE on this GPU; with --tune, find better tiles",
            run="minisgl_moe_triton.command:run",
            add_arguments=_add_arguments,
        )
    ]


def _add_arguments(parser: ArgumentParser) -> None:
    sizes = {
        "--num-experts": (128, "experts of a layer"),
        "--top-k": (8, "experts of a token"),
        "--hidden-size": (2048, "width of input and output"),
        "--intermediate-size": (768, "width of one expert on one rank"),
    }
    group = parser.add_argument_group("layer")
    for flag, (default, text) in sizes.items():
        group.add_argument(
            flag, type=int, metavar="INT", default=default, help=f"{text} [default {default}]"
        )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of activations and weights [default bfloat16]",
    )
    group.add_argument(
        "--tokens", metavar="LIST", default="1,8,64,256,4096",
        help="token counts, with commas [default 1,8,64,256,4096]",
    )  # fmt: skip
    parser.add_argument("--tune", action="store_true", help="try tiles and keep the best ones")
    parser.add_argument(
        "--table", metavar="FILE", help="table to write, in place of the one in the user's cache"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


MOE = BackendSpec(
    api=PLUGIN_API,
    factory="minisgl_moe_triton.backend:FusedMoEBackend",
    summary="Triton grouped products with fused routing, NVIDIA GPUs from Ampere on",
    aliases=("triton",),
    settings=FusedSettings,
    probe=probe_moe,
)
