from __future__ import annotations

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from minisgl.errors import RequestError
from minisgl.tokenizer.encode import encode_text
from tests.tiny_models import BOS, build_tokenizer


def tokenizer_with_bos() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 1)]
    )
    return tokenizer


def test_a_prompt_gets_the_one_bos_of_its_tokenizer() -> None:
    plain = build_tokenizer().encode("Paris")
    assert encode_text(build_tokenizer(), "Paris") == plain
    assert encode_text(tokenizer_with_bos(), "Paris") == [1, *plain]


def test_a_bos_that_is_spelled_out_is_not_doubled() -> None:
    tokenizer = tokenizer_with_bos()
    assert encode_text(tokenizer, f"{BOS}Paris") == encode_text(tokenizer, "Paris")


def test_special_tokens_can_be_left_off() -> None:
    plain = build_tokenizer().encode("Paris")
    assert encode_text(tokenizer_with_bos(), "Paris", add_special_tokens=False) == plain


def test_an_empty_prompt_is_refused_unless_a_bos_begins_it() -> None:
    with pytest.raises(RequestError, match="prompt: is empty"):
        encode_text(build_tokenizer(), "")
    assert encode_text(tokenizer_with_bos(), "") == [1]


def test_a_prompt_that_is_no_string_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt: must be a string, not int"):
        encode_text(build_tokenizer(), 3)  # type: ignore[arg-type]  # wrong on purpose


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt: is not UTF-8 text: .*udce9"):
        encode_text(build_tokenizer(), "caf\udce9")


def test_a_prompt_longer_than_the_tokenizer_s_limit_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = 4
    assert len(encode_text(tokenizer, "xyz " * 20)) > 4
    assert caplog.text == ""
