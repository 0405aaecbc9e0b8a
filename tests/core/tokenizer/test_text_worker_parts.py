"""The encoder and the decoder of the text worker, without processes."""

from __future__ import annotations

import json
import re
import time

import pytest
from transformers import PreTrainedTokenizerFast

from minisgl.message.text import (
    ChatPrompt,
    CountMsg,
    DecodeMsg,
    LimitsMsg,
    RefusedMsg,
    StartedMsg,
    TokenizeMsg,
)
from minisgl.message.types import AbortMsg, FinishedReq, ResultMsg, TokenLogprobs
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.decoder import TextDecoder
from minisgl.tokenizer.encoder import PromptEncoder
from minisgl.tokenizer.pieces import TokenPieces
from tests.tiny_models import build_tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    encoder = PromptEncoder(tokenizer, TokenPieces(tokenizer), timeout_s=0.5)
    encoder.limits = LimitsMsg(max_seq_len=16, vocab_size=320)
    return encoder


@pytest.fixture
def decoder(tokenizer: PreTrainedTokenizerFast) -> TextDecoder:
    return TextDecoder(TokenPieces(tokenizer))


def test_a_seed_is_counted_up_over_choices(encoder: PromptEncoder) -> None:
    requests = encoder.tokenize(TokenizeMsg([4, 5], "hi", SamplingParams(seed=9, n=2)))
    assert isinstance(requests, list)
    assert [(r.uid, r.sampling_params.seed) for r in requests] == [(4, 9), (5, 10)]
    assert requests[0].input_ids.tolist() == requests[1].input_ids.tolist()


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "prompt: is empty"),
        ([], "prompt: is empty"),
        ([5] * 16, "prompt: has 16 tokens"),
        ([5, 320], "token id 320: must be from 0 to 319"),
        ([-1], "token id -1"),
        (ChatPrompt("[]"), "messages: is empty"),
        (ChatPrompt('[{"role": "user"}]', template="{{ raise_exception('no') }}"), "no"),
        (ChatPrompt('[{"role": "user"}]', template="{{ x | nofilter }}"), "nofilter"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_alone(
    encoder: PromptEncoder, prompt: str | list[int] | ChatPrompt, complaint: str
) -> None:
    refused = encoder.tokenize(TokenizeMsg([1, 2], prompt, PARAMS))
    assert isinstance(refused, RefusedMsg)
    assert refused.uids == [1, 2]
    assert complaint in refused.detail
    assert isinstance(encoder.tokenize(TokenizeMsg([3], "hi", PARAMS)), list)


@pytest.mark.parametrize(
    "prompt", ["a" * 10**7, ChatPrompt('[{"role": "user", "content": "' + "a" * 10**7 + '"}]')]
)
def test_a_hopelessly_long_prompt_is_refused_without_being_tokenized(
    encoder: PromptEncoder, prompt: str | ChatPrompt
) -> None:
    start = time.process_time()
    refused = encoder.tokenize(TokenizeMsg([1], prompt, PARAMS))
    assert time.process_time() - start < 0.4  # tokenizing takes ten times as long
    assert isinstance(refused, RefusedMsg)
    assert re.match(r"prompt: has 100000\d\d characters, and a token has at most", refused.detail)
    assert "prompt and output together may have 16" in refused.detail
    assert isinstance(encoder.count(CountMsg(2, prompt, must_fit=True)), RefusedMsg)


def test_what_a_template_leaves_out_does_not_count(encoder: PromptEncoder) -> None:
    text = json.dumps([{"role": "user", "content": "a" * 10**5}])
    requests = encoder.tokenize(TokenizeMsg([1], ChatPrompt(text, template="hi"), PARAMS))
    assert isinstance(requests, list)


def test_counting_has_no_limit(encoder: PromptEncoder) -> None:
    assert not isinstance(encoder.count(CountMsg(1, "hello " * 10**4)), RefusedMsg)


def test_a_template_that_does_not_end_is_cut_off(encoder: PromptEncoder) -> None:
    start = time.monotonic()
    prompt = ChatPrompt('[{"role": "user", "content": "hi"}]', template=ENDLESS)
    refused = encoder.tokenize(TokenizeMsg([1], prompt, PARAMS))
    assert isinstance(refused, RefusedMsg)
    assert "took longer than 0.5 s" in refused.detail
    assert time.monotonic() - start < 5


def test_counting_and_decoding_are_inverse(encoder: PromptEncoder) -> None:
    counted = encoder.count(CountMsg(1, "héllo 🙂"))
    assert not isinstance(counted, RefusedMsg)
    decoded = encoder.decode(DecodeMsg(2, counted.token_ids))
    assert not isinstance(decoded, RefusedMsg)
    assert decoded.text == "héllo 🙂"
    assert len(counted.tokens) == len(counted.token_ids)


def start(decoder: TextDecoder, tokenizer: PreTrainedTokenizerFast, stop: str = "") -> list[int]:
    decoder.start(StartedMsg(1, SamplingParams(stop=(stop,) if stop else ())))
    ids: list[int] = tokenizer("héllo 🙂 wörld")["input_ids"]
    return ids


def test_pieces_of_a_request_are_its_text(
    decoder: TextDecoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = start(decoder, tokenizer)
    texts = []
    for token_id in ids:
        message, aborts = decoder.decode(ResultMsg([1], [token_id]))
        texts += message.texts
        assert aborts == []
    message, _ = decoder.decode(ResultMsg([], [], [FinishedReq(1, "length", "", None, 3, 9, 2)]))
    assert "".join([*texts, *message.texts]) == "héllo 🙂 wörld"
    assert message.finished[0].num_output_tokens == len(ids)
    assert message.finished[0].num_cached_tokens == 2
    assert decoder.num_open == 0


def test_an_unfinished_character_comes_out_at_the_end(
    decoder: TextDecoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    start(decoder, tokenizer)
    vocab = tokenizer.get_vocab()
    half = [vocab["ð"], vocab["Ł"]]
    message, _ = decoder.decode(ResultMsg([1, 1], half, [FinishedReq(1, "length")]))
    assert "".join(message.texts) == "\ufffd"


def test_a_stop_string_aborts_once_and_the_end_says_stop(
    decoder: TextDecoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = start(decoder, tokenizer, stop="o 🙂")
    shown, stops = "", []
    for token_id in ids:
        message, aborts = decoder.decode(ResultMsg([1], [token_id]))
        shown += "".join(message.texts)
        stops += aborts
    message, _ = decoder.decode(ResultMsg([], [], [FinishedReq(1, "abort", "a stop string")]))
    assert shown == "héll"
    assert stops == [AbortMsg(1, "a stop string was found")]
    assert (message.finished[0].reason, message.finished[0].stop_reason) == ("stop", "o 🙂")
    assert message.finished[0].num_output_tokens < len(ids)


@pytest.mark.parametrize(
    ("min_tokens", "stop", "text", "num_tokens"),
    [
        (0, "l", "hé", 4),
        (4, "l", "hél", 5),  # é has two tokens
        (4, "éll", "h", 5),
        (2, "é", "h", 3),
        (3, "é", "héllo", 6),
    ],
)
def test_a_stop_string_ends_in_text_of_tokens_after_the_first(
    decoder: TextDecoder, min_tokens: int, stop: str, text: str, num_tokens: int
) -> None:
    vocab = build_tokenizer().get_vocab()
    ids = [vocab[token] for token in ("h", "Ã", "©", "l", "l", "o")]
    decoder.start(StartedMsg(1, SamplingParams(stop=stop, min_tokens=min_tokens)))
    message, aborts = decoder.decode(ResultMsg([1] * 6, ids, [FinishedReq(1, "length")]))
    is_stopped = text != "héllo"
    assert "".join(message.texts) == text
    assert message.finished[0].reason == ("stop" if is_stopped else "length")
    assert message.finished[0].num_output_tokens == num_tokens
    assert len(aborts) == is_stopped


def test_the_token_that_ends_a_request_has_no_text(decoder: TextDecoder) -> None:
    decoder.start(StartedMsg(1, SamplingParams(skip_special_tokens=False)))
    message, _ = decoder.decode(ResultMsg([1], [2], [FinishedReq(1, "stop", "", 2)]))
    assert message.texts == []
    assert message.finished[0].stop_reason == 2


def test_infinite_logprobs_are_made_finite(
    decoder: TextDecoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = start(decoder, tokenizer)
    logprobs = TokenLogprobs(ids[0], float("-inf"), (ids[0],), (float("-inf"),))
    message, _ = decoder.decode(ResultMsg([1], [ids[0]], [], {0: logprobs}))
    assert message.logprobs[0].logprob == -9999.0
    assert message.logprobs[0].top_logprobs == [-9999.0]


def test_requests_that_were_never_started_are_not_kept(decoder: TextDecoder) -> None:
    message, aborts = decoder.decode(ResultMsg([9], [5], [FinishedReq(9, "length")]))
    assert (message.uids, message.finished, aborts) == ([], [], [])
    assert decoder.num_open == 0
