"""What is public changes only together with the changelog."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site import api
from docs.site.surface import Class, Function, Member, read_module
from tests.packaging.workspace import Distribution, distributions

MODULE = '''"""A module."""
from dataclasses import dataclass

LIMIT = 3
_HIDDEN = 4

@dataclass(frozen=True)
class Thing(Base):
    """A thing."""

    size: int
    name: str = "x"

    def grow(self, by: int = 1) -> int:
        """Grow."""

    def _shrink(self) -> None: ...

def make(*, size: int) -> Thing:
    """Make one."""
'''
OLD = "## a.b\nclass Thing\n    Thing.size: int\n    Thing.grow(self) -> int\n"


def test_the_list_is_that_of_the_code() -> None:
    is_current = api.LISTING.read_text() == api.render()
    assert is_current, "what is public has changed: name it in changelog.d/, then `make api`"


def test_a_module_is_read_as_it_is_seen_from_outside(tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text(MODULE)
    limit, thing, make = read_module("thing", tmp_path / "thing.py").members
    assert limit.name == "LIMIT"
    assert isinstance(thing, Class)
    assert thing.bases == ("Base",)
    assert [each.declaration() for each in thing.fields] == ["size: int", "name: str = 'x'"]
    assert [each.declaration() for each in thing.methods] == ["grow(self, by: int=1) -> int"]
    assert isinstance(make, Function)
    assert make.declaration() == "make(*, size: int) -> Thing"


@pytest.mark.parametrize(
    ("new", "changed"),
    [
        (OLD, []),
        (OLD + "make() -> Thing\n", ["a.b: make"]),
        (OLD.replace("(self)", "(self, by: int)"), ["a.b: Thing.grow"]),
        (OLD.replace("    Thing.size: int\n", ""), ["a.b: Thing.size"]),
        ("", ["a.b: Thing", "a.b: Thing.grow", "a.b: Thing.size"]),
    ],
)
def test_every_change_has_to_be_named(new: str, changed: list[str]) -> None:
    assert api.unnamed(OLD, new, "Something else: `Things`, make, Thing.grow.") == changed


@pytest.mark.parametrize("fragment", ["`Thing`", "`Thing.size`", "`size`", "`--a.size`", "`a.b`"])
def test_a_change_can_be_named_in_several_ways(fragment: str) -> None:
    assert api.unnamed(OLD, OLD.replace("size: int", "size: str"), f"Now {fragment}.") == []


def test_a_flag_names_its_setting() -> None:
    assert api.unnamed("## a.b\nS.max_len: int\n", "", "`--x.max-len N` is gone.") == []


def test_a_list_is_not_written_when_the_changelog_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = tmp_path / "list.txt"
    before = api.render() + "## a.b\ngone() -> None\n"
    listing.write_text(before)
    monkeypatch.setattr(api, "LISTING", listing)
    monkeypatch.setattr(api, "CHANGES", tmp_path)
    assert api.main() == 1
    assert capsys.readouterr().err.startswith("a.b: gone: has changed")
    assert listing.read_text() == before
    (tmp_path / "1.removed.md").write_text("`gone` is gone.")
    assert api.main() == 0
    assert listing.read_text() == api.render()


@pytest.mark.parametrize("dist", distributions(), ids=str)
def test_what_is_public_is_typed(dist: Distribution) -> None:
    assert (dist.source / "py.typed").is_file()
    mine = [each for each in api.public_modules() if each[1].is_relative_to(dist.folder)]
    bare = [
        f"{name}.{member.name}"
        for name, path in mine
        for member in functions(read_module(name, path).members)
        if "->" not in member.signature and member.name != "__init__"
    ]
    assert bare == []


def functions(members: tuple[Member, ...]) -> list[Function]:
    """Functions and methods among what a module has."""
    own = [each for each in members if isinstance(each, Function)]
    return own + [m for each in members if isinstance(each, Class) for m in each.methods]
