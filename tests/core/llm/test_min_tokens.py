"""``min_tokens`` and whatever ends a request of the offline LLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from tests.tiny_models import TinyModel, save_tiny_model

STRAY = 5000
"""An end of sequence that the model's files name, but that is behind its vocabulary."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("min_tokens_model")
    model = save_tiny_model(folder, TinyModel(arch="llama", vocab_size=320))
    model.generation_config.eos_token_id = [2, STRAY]
    model.generation_config.save_pretrained(folder)
    with LLM(str(folder), max_running_req=8, num_page_override=64, page_size=4) as llm:
        yield llm


def params_for(llm: LLM, **fields: Any) -> SamplingParams:  # Any: of each field
    """Let every token be a Z."""
    (token,) = llm.tokenizer("Z")["input_ids"]
    given: dict[str, Any] = {"max_tokens": 8, "logit_bias": {token: 100.0}}  # Any: as above
    return SamplingParams(**given | fields)


CASES = [
    (0, "Z", "", 1),
    (0, "ZZ", "", 2),
    (3, "Z", "ZZZ", 4),
    (3, "ZZ", "ZZ", 4),  # begins in text of the third token
    (3, "ZZZZ", "", 4),
    (3, "ZZZZZ", "", 5),
    (7, "ZZZ", "ZZZZZ", 8),
    (8, "Z", "ZZZZZZZZ", None),
]


@pytest.mark.parametrize(("min_tokens", "stop", "text", "num_tokens"), CASES)
def test_a_stop_string_ends_after_the_first_tokens(
    llm: LLM, min_tokens: int, stop: str, text: str, num_tokens: int | None
) -> None:
    params = params_for(llm, min_tokens=min_tokens, stop=stop, n=2)
    (output,) = llm.generate("def", params)
    for choice in output["choices"]:
        assert choice["text"] == text
        assert len(choice["token_ids"]) == (num_tokens or 8)
        assert choice["finish_reason"] == ("stop" if num_tokens else "length")
        assert choice["stop_reason"] == (stop if num_tokens else None)


@pytest.mark.parametrize(("min_tokens", "stop", "text", "num_tokens"), CASES)
def test_a_stream_ends_where_the_whole_does(
    llm: LLM, min_tokens: int, stop: str, text: str, num_tokens: int | None
) -> None:
    chunks = list(llm.stream("def", params_for(llm, min_tokens=min_tokens, stop=stop)))
    assert "".join(chunk["text"] for chunk in chunks) == text
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == (num_tokens or 8)
    assert chunks[-1]["finish_reason"] == ("stop" if num_tokens else "length")


def test_an_end_of_sequence_of_the_models_own_may_be_behind_its_vocabulary(llm: LLM) -> None:
    (output,) = llm.generate("def", params_for(llm, logit_bias={2: 100.0}, min_tokens=3))
    assert (output["finish_reason"], output["stop_reason"], output["error"]) == ("stop", 2, None)
    assert len(output["token_ids"]) == 4
