from __future__ import annotations

import pytest

import minisgl
import minisgl.core


def test_the_package_offers_its_public_classes_when_asked() -> None:
    assert minisgl.SamplingParams is minisgl.core.SamplingParams
    assert minisgl.LLM.__module__ == "minisgl.llm"


def test_the_package_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="module 'minisgl' has no attribute 'Nothing'"):
        getattr(minisgl, "Nothing")  # noqa: B009 - mypy refuses the plain form
