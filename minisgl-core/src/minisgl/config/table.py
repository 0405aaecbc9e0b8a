"""The settings reference of the documentation, made from the tree."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.config.arguments import default_of
from minisgl.config.tree import Section, SettingsTree

HEAD = """# Settings

One tree is the source of flags, environment variables, file keys and this page. A flag beats the
environment, which beats the file (`--config FILE` or `MINISGL_CONFIG`, YAML or TOML), which beats
the default. From Python the file keys are keywords:
`LLM("demo", page_size=16, fa={"num_splits": 2})`. An unknown flag, key, keyword or `MINISGL_`
variable is an error. Installed backends add sections of their own under their names;
`minisgl generate --help` shows all that are here.

"""


def render_page(tree: SettingsTree) -> str:
    """Return the page of the documentation."""
    return HEAD + render_table(tree).rstrip() + "\n"


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
