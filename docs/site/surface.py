"""What a module offers, read from its source: names, signatures, fields and docstrings.

Nothing is imported, so the result is the same on every machine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARKS = ("property", "classmethod", "staticmethod", "abstractmethod")
"""Decorators that a caller, or whoever implements it, has to know of."""

SPECIAL = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__len__")


@dataclass(frozen=True, slots=True)
class Value:
    """A constant of a module, or a field of a class.

    Attributes:
        name: Its name.
        annotation: As it stands in the source; may be empty.
        default: As it stands in the source; may be empty.
        doc: The string below it; may be empty.
    """

    name: str
    annotation: str
    default: str
    doc: str = ""

    def declaration(self, owner: str = "") -> str:
        """Return it as it is declared; ``owner`` is put in front of its name."""
        annotation = f": {self.annotation}" if self.annotation else ""
        return owner + self.name + annotation + (f" = {self.default}" if self.default else "")


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method.

    Attributes:
        name: Its name.
        signature: Arguments and result.
        doc: Its docstring.
        marks: Names of its decorators.
    """

    name: str
    signature: str
    doc: str
    marks: tuple[str, ...] = ()

    def declaration(self, owner: str = "") -> str:
        """Return it as it is declared, without its body; ``owner`` is put in front of its name."""
        marks = [f"@{mark} " for mark in self.marks if mark in MARKS]
        return "".join(marks) + owner + self.name + self.signature


@dataclass(frozen=True, slots=True)
class Class:
    """A class.

    Attributes:
        name: Its name.
        bases: As they stand in the source.
        doc: Its docstring.
        fields: Annotated attributes, and the members of an enumeration.
        methods: Public ones.
    """

    name: str
    bases: tuple[str, ...]
    doc: str
    fields: tuple[Value, ...]
    methods: tuple[Function, ...]


Member = Value | Function | Class


@dataclass(frozen=True, slots=True)
class Module:
    """A module.

    Attributes:
        name: Its dotted name.
        doc: Its docstring.
        members: What is public, in order of definition.
        exports: Names of ``__all__`` that are defined elsewhere.
    """

    name: str
    doc: str
    members: tuple[Member, ...]
    exports: tuple[str, ...] = ()


def read_module(name: str, path: Path) -> Module:
    """Read the source of one module."""
    tree = ast.parse(path.read_text())
    found = tuple(_members(tree.body))
    listed = {each for node in tree.body for each in _all_of(node)}
    members = tuple(each for each in found if not listed or each.name in listed)
    exports = tuple(sorted(listed - {member.name for member in members}))
    return Module(name, ast.get_docstring(tree) or "", members, exports)


def _members(body: list[ast.stmt]) -> Iterator[Member]:
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield _class(node)
        elif isinstance(node, ast.FunctionDef) and _is_public(node.name):
            yield _function(node)
        else:
            yield from _values([node], _string(after))


def _class(node: ast.ClassDef) -> Class:
    own = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return Class(
        name=node.name,
        bases=tuple(ast.unparse(base) for base in [*node.bases, *node.keywords]),
        doc=ast.get_docstring(node) or "",
        fields=tuple(_values(node.body)),
        methods=tuple(_function(each) for each in own if _is_public(each.name)),
    )


def _function(node: ast.FunctionDef) -> Function:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return Function(
        name=node.name,
        signature=f"({ast.unparse(node.args)}){returns}",
        doc=ast.get_docstring(node) or "",
        marks=tuple(ast.unparse(each) for each in node.decorator_list),
    )


def _values(body: Iterable[ast.stmt], doc: str = "") -> Iterator[Value]:
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = "" if node.value is None else _default(node.value)
            found = [Value(node.target.id, ast.unparse(node.annotation), default, doc)]
        elif isinstance(node, ast.Assign):
            names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            found = [Value(name, "", ast.unparse(node.value), doc) for name in names]
        else:
            continue
        yield from (each for each in found if _is_public(each.name))


def _default(node: ast.expr) -> str:
    """Return a default as it stands in the source, of a setting without its description."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field":
        node.keywords = [each for each in node.keywords if each.arg != "description"]
    return ast.unparse(node)


def _is_public(name: str) -> bool:
    return name in SPECIAL or not (name.startswith("_") or name in ("logger", "model_config"))


def _string(node: ast.stmt | None) -> str:
    """Return the string that a statement consists of."""
    is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return str(node.value.value) if is_string else ""  # type: ignore[union-attr]  # is_string


def _all_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return list(ast.literal_eval(node.value))
    return []
