"""The part of a page in ``docs/backends/`` that is made from the code: contracts and hooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from docs.site.docstrings import attributes, quote, to_markdown
from docs.site.surface import Class, Function, Member, Module, Value, read_module

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "minisgl-core" / "src"
PAGES = ROOT / "docs" / "backends"
MARK = """\
<!-- Made from the code by `make pages`: what is below is not written by hand. -->
<!-- fmt: off -->"""

MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("minisgl.attention.contract",),
        "cache": ("minisgl.kvcache.contract",),
        "comm": ("minisgl.distributed.contract",),
        "hooks": ("minisgl.plugin.hookspecs", "minisgl.plugin.records", "minisgl.plugin.commands"),
        "kernels": ("minisgl.ops.contract",),
        "model": ("minisgl.models.contract", "minisgl.layers.base"),
        "moe": ("minisgl.moe.contract",),
        "policy": ("minisgl.scheduler.contract",),
        "source": ("minisgl.weights.contract",),
        "spec": ("minisgl.plugin.spec",),
    }
)
"""Which modules the reference of each page is made from."""


def expected_page(page: str, text: str) -> str:
    """Return a page with its reference made anew.

    Args:
        page: A key of `MODULES`.
        text: The page as it is; what is above the mark stays.
    """
    own = text.partition(MARK)[0].rstrip()
    modules = [read_module(name, module_path(name)) for name in MODULES[page]]
    return f"{own}\n\n{MARK}\n\n" + "\n\n".join(_module(each) for each in modules) + "\n"


def module_path(name: str) -> Path:
    """Return the file of a module of the core."""
    return CORE / (name.replace(".", "/") + ".py")


def _module(module: Module) -> str:
    path = module_path(module.name).relative_to(ROOT).as_posix()
    head = f"## Reference: `{module.name}`\n\n[Source](../../{path})."
    members = [_member(member) for member in module.members if member.doc]
    return "\n\n".join([head, to_markdown(module.doc), *members])


def _member(member: Member) -> str:
    if isinstance(member, Class):
        return "\n\n".join(_class(member))
    if isinstance(member, Function):
        return "\n\n".join(_function(member, level=3))
    return "\n\n".join([f"### {member.name}", _code(member.declaration()), to_markdown(member.doc)])


def _class(cls: Class) -> Iterator[str]:
    yield f"### {cls.name}"
    if cls.bases:
        yield _code(f"class {cls.name}({', '.join(cls.bases)})")
    yield to_markdown(cls.doc)
    if cls.fields:
        yield _table(cls.fields, attributes(cls.doc))
    for method in cls.methods:
        if method.doc and method.name != "__init__":
            yield from _function(method, level=4, owner=f"{cls.name}.")


def _function(function: Function, level: int, owner: str = "") -> Iterator[str]:
    yield f"{'#' * level} {owner}{function.name}"
    yield _code(re.sub(r"(@\w+) ", r"\1\n", function.declaration()))
    yield to_markdown(function.doc)


def _table(fields: Iterable[Value], said: Mapping[str, str]) -> str:
    rows = [
        f"| `{field.name}` | `{quote(field.annotation)}` | {_default(field)} | "
        f"{quote(said.get(field.name, ''))} |"
        for field in fields
    ]
    return "\n".join(
        ["| field | type | default | what it is |", "| --- | --- | --- | --- |", *rows]
    )


def _default(field: Value) -> str:
    return f"`{quote(field.default)}`" if field.default else ""


def _code(text: str) -> str:
    return f"~~~~python\n{text}\n~~~~"
