"""Docstrings in Google's style as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from textwrap import dedent

TITLES = ("Args", "Returns", "Yields", "Raises", "Attributes")
TITLE = re.compile(rf"^({'|'.join(TITLES)}):$", re.MULTILINE)
ENTRY = re.compile(r"^(\*{0,2}\w+): ", re.MULTILINE)
EXAMPLE = re.compile(r"::\n\n((?:    .*\n|\n)+)")


def to_markdown(doc: str) -> str:
    """Return a docstring as Markdown, but for its ``Attributes``."""
    text, sections = split(doc)
    parts = [_prose(text)]
    for title, body in sections.items():
        if title in ("Args", "Raises"):
            entries = "\n".join(f"- `{name}`: {what}" for name, what in _entries(body))
            parts.append(f"**{title}**\n\n{entries}")
        elif title != "Attributes":
            parts.append(f"**{title}** {_prose(body)}")
    return "\n\n".join(part for part in parts if part)


def attributes(doc: str) -> dict[str, str]:
    """Return what the section ``Attributes`` says of each name, as one line of Markdown."""
    return dict(_entries(split(doc)[1].get("Attributes", "")))


def split(doc: str) -> tuple[str, Mapping[str, str]]:
    """Split a docstring into its text and its sections, which lose their indentation.

    Text that follows a section without being indented belongs to the text.
    """
    marks = list(TITLE.finditer(doc))
    ends = [mark.start() for mark in marks[1:]] + [len(doc)]
    text, sections = doc[: marks[0].start()] if marks else doc, {}
    for mark, end in zip(marks, ends, strict=False):
        body = doc[mark.end() : end].strip("\n")
        inside = re.match(r"(?:(?: .*)?\n?)*", body)
        cut = inside.end() if inside else 0
        sections[mark[1]] = dedent(body[:cut]).strip()
        text += "\n" + body[cut:]
    return text.strip(), sections


def _entries(body: str) -> Iterator[tuple[str, str]]:
    """Yield name and description of each entry, the description in one line."""
    starts = list(ENTRY.finditer(body))
    ends = [mark.start() for mark in starts[1:]] + [len(body)]
    for mark, end in zip(starts, ends, strict=False):
        yield mark[1], _prose(" ".join(body[mark.end() : end].split()))


def _prose(text: str) -> str:
    """Turn double backticks into single ones and indented examples into fenced blocks."""
    text = EXAMPLE.sub(_fenced, text + "\n")
    return text.replace("``", "`").strip()


def _fenced(match: re.Match[str]) -> str:
    return f":\n\n~~~~python\n{dedent(match[1]).strip()}\n~~~~\n\n"


def quote(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
