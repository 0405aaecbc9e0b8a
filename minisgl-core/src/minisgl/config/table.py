"""The settings reference of the documentation, made from the tree."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.config.arguments import default_of
from minisgl.config.tree import Section, SettingsTree


def render_table(tree: SettingsTree) -> str:
    """Return the reference as Markdown: a heading and a table per section."""
    return "\n".join(line for section in tree.sections for line in _section(section))


def _section(section: Section) -> Iterator[str]:
    title = section.model.__doc__ or section.model.__name__
    owners = f"Backend `{', '.join(section.owners)}`. " if section.owners else ""
    yield f"## {section.key or section.model.__name__.removesuffix('Settings').lower()}"
    yield ""
    yield f"{owners}{title.strip().splitlines()[0]}"
    yield ""
    yield "| flag | file key | environment | allowed | default | what it is |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for option in section.options():
        cells = [
            ", ".join(f"`{flag}`" for flag in option.flags),
            f"`{option.path}`",
            f"`{option.variable}`",
            option.allowed,
            default_of(option) or "none",
            option.info.description or "",
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
