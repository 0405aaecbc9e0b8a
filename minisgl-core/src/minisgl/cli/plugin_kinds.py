"""What ``minisgl plugins new`` can write: one entry per kind, its texts and what it imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minisgl.plugin.discovery import HOOK_GROUP, KINDS


@dataclass(frozen=True, slots=True)
class PluginKind:
    """A kind of plugin that can be written.

    Attributes:
        kind: What the user types; also the folder of its templates.
        noun: What to call one.
        summary: One line on what the written one does.
        short: Second part of the distribution's name.
        suffix: Last word of its class.
        pick: Arguments of ``minisgl`` that pick it; ``$name`` stands for its name.
        requirements: What its code imports besides the core.
        test_requirements: What its tests import besides.
        constant: Name of the spec in ``plugin.py``; empty for a hook plugin.
        example: A name for help and messages.
        has_suite: Whether `minisgl.testing` has a suite for it.
        reserved: Names that mean something else already, whatever is installed.
    """

    kind: str
    noun: str
    summary: str
    short: str
    suffix: str
    pick: str
    requirements: tuple[str, ...]
    test_requirements: tuple[str, ...] = ("minisgl-core[testing]",)
    constant: str = ""
    example: str = "my-backend"
    has_suite: bool = True
    reserved: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"{HOOK_GROUP}.{self.kind}" if self.kind in KINDS else HOOK_GROUP

    @property
    def phrase(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    @property
    def is_class_name(self) -> bool:
        """Whether its name is that of a class, as config.json has it."""
        return self.kind == "model"


_KINDS = (
    PluginKind(
        kind="attention",
        noun="attention backend",
        summary="scaled dot-product attention, one request at a time",
        short="attn",
        suffix="Attention",
        pick="--attn $name",
        requirements=("pydantic>=2.10", "torch>=2.9"),
        constant="ATTENTION",
    ),
    PluginKind(
        kind="cache",
        noun="prefix cache",
        summary="a dictionary of pages, the least recently used go first",
        short="cache",
        suffix="Cache",
        pick="--cache $name",
        requirements=("numpy>=1.26", "pydantic>=2.10"),
        constant="CACHE",
    ),
    PluginKind(
        kind="kernels",
        noun="kernel set",
        summary="two ops in plain PyTorch",
        short="kernels",
        suffix="Kernels",
        pick="--kernels $name,torch",
        requirements=("pydantic>=2.10", "torch>=2.9"),
        constant="KERNELS",
    ),
    PluginKind(
        kind="moe",
        noun="mixture-of-experts backend",
        summary="a loop over all experts",
        short="moe",
        suffix="MoE",
        pick="--moe $name",
        requirements=("pydantic>=2.10", "torch>=2.9"),
        constant="MOE",
    ),
    PluginKind(
        kind="comm",
        noun="communicator",
        summary="collectives of torch.distributed's default group",
        short="comm",
        suffix="Communicator",
        pick="--comm $name --tp 2",
        requirements=("pydantic>=2.10", "torch>=2.9"),
        constant="COMM",
    ),
    PluginKind(
        kind="policy",
        noun="schedule policy",
        summary="the shortest prompt starts first",
        short="policy",
        suffix="Policy",
        pick="--policy $name",
        requirements=("pydantic>=2.10",),
        constant="POLICY",
    ),
    PluginKind(
        kind="model",
        noun="model architecture",
        summary="a decoder in the layout of Llama, made of the core's layers",
        short="model",
        suffix="",
        pick="--model FOLDER",
        requirements=("torch>=2.9",),
        constant="MODEL",
        example="MyModelForCausalLM",
    ),
    PluginKind(
        kind="source",
        noun="model source",
        summary="models by a prefix, from one folder",
        short="source",
        suffix="Source",
        pick="--model $name:MODEL",
        requirements=("pydantic>=2.10",),
        constant="SOURCE",
        example="my-source",
    ),
    PluginKind(
        kind="logits_processor",
        noun="logits processor",
        summary="tokens that are never sampled",
        short="logits",
        suffix="Processor",
        pick="",
        requirements=("torch>=2.9",),
        example="ban-tokens",
    ),
    PluginKind(
        kind="command",
        noun="subcommand",
        summary="how many tokens per second a model generates here",
        short="command",
        suffix="Command",
        pick="",
        requirements=(),
        example="measure",
        has_suite=False,
    ),
    PluginKind(
        kind="routes",
        noun="set of HTTP routes",
        summary="a page of the server that lists the installed backends",
        short="routes",
        suffix="Routes",
        pick="",
        requirements=("minisgl-server", "starlette>=0.40"),
        test_requirements=("httpx>=0.27", "pytest>=8.3"),
        example="backends",
        has_suite=False,
        # A page of one of these names would lie behind the server's own.
        reserved=("abort", "detokenize", "generate", "health", "metrics", "tokenize", "version"),
    ),
)

PLUGIN_KINDS: Mapping[str, PluginKind] = MappingProxyType({each.kind: each for each in _KINDS})
"""Every kind that can be written, by its name."""
