"""A hook of MkDocs: files outside of ``docs/`` that pages link to become pages of the site.

So the same relative links work in a checkout and in the built site, and a link to a file that is
gone fails the build, wherever it points.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = "docs/"
SOURCES = "source/"
"""Folder of the site that holds what lies outside of ``docs/``."""

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"^ *(```+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".json": "json", ".cu": "cuda"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside that a page, or one of the added pages, links to."""
    pages = [file for file in files if file.is_documentation_page()]
    queue = [(PAGES + file.src_uri, file.content_string) for file in pages]
    added: set[str] = set()
    while queue:
        origin, text = queue.pop()
        for path in _links(origin, text):
            if path.startswith(PAGES) or path in added or not (ROOT / path).exists():
                continue  # what does not exist is left to the strict build
            added.add(path)
            content = _content(path)
            files.append(File.generated(config, _site_uri(path), content=content))
            queue.append((path, content if _is_prose(path) else ""))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages that stand for files outside of ``docs/``."""
    del config, files
    uri = page.file.src_uri
    origin = uri.removeprefix(SOURCES) if uri.startswith(SOURCES) else PAGES + uri

    def site_link(match: re.Match[str]) -> str:
        path = _resolve(origin, match[1])
        if not uri.startswith(SOURCES) and path.startswith(PAGES):
            return match[1]
        return relpath(_site_uri(path), dirname(uri) or ".")

    return _outside_fences(markdown, lambda text: LINK.sub(site_link, text))


def _content(path: str) -> str:
    """Return the page that shows a file or a folder."""
    place = ROOT / path
    head = f"---\nsearch: {{ exclude: true }}\ntitle: {path}\n---\n\n"
    if place.is_dir():
        names = sorted(each.name for each in place.iterdir() if each.is_file())
        name = place.name
        return f"{head}# {path}\n\n" + "".join(f"- [{each}]({name}/{each})\n" for each in names)
    if _is_prose(path):
        return head + place.read_text()
    language = LANGUAGES.get(place.suffix, "text")
    return f"{head}# {path}\n\n~~~~{language}\n{place.read_text()}\n~~~~\n"


def _links(origin: str, text: str) -> Iterator[str]:
    """Yield what a page links to inside of the repository, as paths from its root."""
    for match in LINK.finditer(FENCE.sub("", text)):
        yield _resolve(origin, match[1])


def _resolve(origin: str, link: str) -> str:
    return normpath(join(dirname(origin), link))


def _site_uri(path: str) -> str:
    """Return where a file of the repository is in the site's sources."""
    if path.startswith(PAGES):
        return path.removeprefix(PAGES)
    return SOURCES + path + ("" if path.endswith(".md") else ".md")


def _is_prose(path: str) -> bool:
    """Whether a page has links of its own: Markdown, and the list of a folder."""
    return path.endswith(".md") or (ROOT / path).is_dir()


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to all that is not a fenced block."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
