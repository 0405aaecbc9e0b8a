from __future__ import annotations

from minisgl.shown import shown


def test_a_value_that_python_refuses_to_write_is_named_by_its_type() -> None:
    assert shown(10**5000) == "of type int, too long to show"


def test_a_long_value_is_cut() -> None:
    assert shown("x") == "'x'"
    assert len(shown("x" * 10**6)) < 110
