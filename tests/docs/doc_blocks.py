"""The fenced blocks of everything that users read, and the commands in the running text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from docs.site.reference import MARK
from tests.packaging.workspace import ROOT, relative

DOCUMENTS = tuple(
    relative(path)
    for pattern in (
        "README.md",
        "minisgl-*/README.md",
        "examples/plugins/*/README.md",
        "docs/**/*.md",
    )
    for path in sorted(ROOT.glob(pattern))
)
"""By their paths from the root of the repository."""

BLOCK = re.compile(
    r"(?:^<!-- test: (?P<note>.+?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>\S*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"`((?:minisgl|pytest|python|make|pip|curl) [^`<…]+)`")
COMMENTED = re.compile(r"# [a-z ]+: ((?:minisgl|python|pip) .+)$")
OPERATORS = ("|", "&&", ";", "&", ">")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        document: Where it is.
        line: Of its first line.
        language: As its fence says; empty for none.
        text: Without the fences.
        note: What the comment ``<!-- test: … -->`` in front of it says; empty for none.
    """

    document: str
    line: int
    language: str
    text: str
    note: str

    @property
    def suite(self) -> str:
        """``KIND:CLASS`` where the block has to conform; else empty."""
        return self.note.removeprefix("suite: ") if self.note.startswith("suite: ") else ""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def written_part(document: str) -> str:
    """Return a document, blank where it is made from the code, so that lines keep their numbers."""
    text = (ROOT / document).read_text()
    return text.partition(MARK)[0]


def blocks(document: str) -> list[Block]:
    """Return the blocks of a document in order."""
    text = written_part(document)
    return [
        Block(
            document=document,
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            text=match["text"],
            note=match["note"] or "",
        )
        for match in BLOCK.finditer(text)
    ]


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks of all documents that are in one of some languages."""
    found = (block for document in DOCUMENTS for block in blocks(document))
    return [block for block in found if block.language in languages]


def inline_commands(document: str) -> list[str]:
    """Return what stands in backticks in the running text and begins like a command."""
    text = BLOCK.sub("", written_part(document))
    return [" ".join(command.split()) for command in INLINE.findall(text)]


def page_commands(document: str) -> list[Command]:
    """Return all commands of a document: those of its blocks, then those of the text, each once."""
    found = [b for b in blocks(document) if b.language == "bash"]
    of_blocks = [command for block in found for command in commands(block.text)]
    of_text = [c for line in inline_commands(document) for c in commands(line)]
    return of_blocks + [each for each in dict.fromkeys(of_text) if each not in of_blocks]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a shell line.

    Attributes:
        words: Program and arguments.
        env: Variables that are set for it.
        reads_previous: Whether its input is the output of the one before.
        output: File that its output goes to; empty for none.
    """

    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    reads_previous: bool = False
    output: str = ""

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(script: str) -> Iterator[Command]:
    """Yield the commands of a shell script that has nothing but commands.

    Those that a comment offers, as in ``# also: COMMAND, COMMAND``, are among them.
    """
    for line in re.sub(r"\\\n", " ", script).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
        lexer.whitespace_split = True
        words = list(lexer)
        start, is_piped = 0, False
        for end in [*(i for i, word in enumerate(words) if word in OPERATORS), len(words)]:
            if start and words[start - 1] == ">":
                start = end + 1  # the file, which belongs to the command before
                continue
            output = words[end + 1] if end < len(words) and words[end] == ">" else ""
            if end > start:
                yield _command(words[start:end], is_piped, output)
            is_piped = end < len(words) and words[end] == "|"
            start = end + 1
        if offered := COMMENTED.search(line):
            yield from commands(offered[1].replace(", ", "\n"))


def _command(words: list[str], is_piped: bool, output: str) -> Command:
    count = 0
    while re.match(r"\w+=", words[count]):
        count += 1
    env = tuple((name, value) for name, _, value in (word.partition("=") for word in words[:count]))
    return Command(tuple(words[count:]), env, is_piped, output)
