"""The offline LLM over a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from minisgl import LLM, SamplingParams
from minisgl.errors import ModelError, PluginError, RequestError, SettingsError
from tests.tiny_models import TinyModel, save_tiny_model

PROMPTS = ["The capital of", "List three", "def", "a b c d e f g"]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llm_model")
    return folder, save_tiny_model(folder, TinyModel(arch="llama", vocab_size=320))


@pytest.fixture(scope="module")
def llm(tiny: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    with LLM(
        str(tiny[0]), max_running_req=8, num_page_override=256, page_size=4, max_seq_len_override=96
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _books_are_right(llm: LLM) -> Iterator[None]:
    yield
    llm.check_integrity()
    assert llm.stats().num_running == 0


def hf_ids(model: PreTrainedModel, ids: list[int], num_tokens: int) -> list[int]:
    ids = list(ids)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-num_tokens:]


def test_a_batch_gives_what_hugging_face_gives(
    llm: LLM, tiny: tuple[Path, PreTrainedModel]
) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.tokenizer(prompt)["input_ids"]
        assert output["token_ids"] == hf_ids(tiny[1], ids, 10)
        assert output["finish_reason"] == "length"
        assert output["usage"]["prompt_tokens"] == len(ids)
        assert output["usage"]["completion_tokens"] == 10
        assert output["text"] == llm.tokenizer.decode(output["token_ids"], skip_special_tokens=True)


def test_many_more_prompts_than_slots_come_back_in_order(llm: LLM) -> None:
    prompts = [[5 + i % 200, 9, 7, 5 + i // 200] for i in range(300)]
    together = llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
    for i in (0, 1, 150, 299):
        alone = llm.generate([prompts[i]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert together[i]["token_ids"] == alone[0]["token_ids"]


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_length_is_exact(llm: LLM, num_tokens: int) -> None:
    (output,) = llm.generate("def", SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    assert len(output["token_ids"]) == num_tokens


def test_token_ids_are_one_prompt_and_lists_of_them_are_many(llm: LLM) -> None:
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1
    assert len(llm.generate([[5, 6, 7], [8]], GREEDY)) == 2


def test_without_a_limit_a_request_ends_at_the_context(llm: LLM) -> None:
    (output,) = llm.generate([[5] * 90], SamplingParams(max_tokens=None, ignore_eos=True))
    assert output["finish_reason"] == "length"
    assert len(output["token_ids"]) == 6


def test_a_stop_token_ends_the_text_before_it(llm: LLM) -> None:
    (plain,) = llm.generate("def", GREEDY)
    stop_id = plain["token_ids"][4]
    first = plain["token_ids"].index(stop_id)
    params = SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=(stop_id,))
    (output,) = llm.generate("def", params)
    assert output["finish_reason"] == "stop"
    assert output["stop_reason"] == stop_id
    assert output["token_ids"] == plain["token_ids"][: first + 1]
    assert output["text"] == llm.tokenizer.decode(
        plain["token_ids"][:first], skip_special_tokens=True
    )


def test_a_stop_string_is_not_part_of_the_text(llm: LLM) -> None:
    (plain,) = llm.generate("The capital", SamplingParams(max_tokens=24, ignore_eos=True))
    middle = len(plain["text"]) // 2
    stop = plain["text"][middle : middle + 3]
    (output,) = llm.generate(
        "The capital", SamplingParams(max_tokens=24, ignore_eos=True, stop=stop)
    )
    assert output["finish_reason"] == "stop"
    assert output["stop_reason"] == stop
    assert output["text"] == plain["text"][: plain["text"].index(stop)]


def test_the_pieces_of_a_stream_are_the_whole(llm: LLM) -> None:
    (whole,) = llm.generate("List three", GREEDY)
    chunks = list(llm.stream("List three", GREEDY))
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert [t for c in chunks for t in c["token_ids"]] == whole["token_ids"]
    assert [c["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == whole["usage"] | {
        "cached_tokens": chunks[-1]["usage"]["cached_tokens"]
    }


def test_interleaved_streams_do_not_disturb_each_other(llm: LLM) -> None:
    wanted = [llm.generate(p, GREEDY)[0]["text"] for p in PROMPTS[:2]]
    streams = [llm.stream(p, GREEDY) for p in PROMPTS[:2]]
    texts = ["", ""]
    for _ in range(11):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, {"text": ""})["text"]
    assert texts == wanted


def test_a_closed_stream_leaves_nothing_running(llm: LLM) -> None:
    stream = llm.stream("def", SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    del stream  # closes it
    assert llm.stats().num_running == 0


def test_n_choices_are_counted_and_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=2.0, seed=3, n=3, ignore_eos=True)
    (first,) = llm.generate("def", params)
    (again,) = llm.generate("def", params)
    assert len({c["text"] for c in first["choices"]}) == 3
    assert first["choices"] == again["choices"]
    assert first["usage"]["completion_tokens"] == 24


def test_logprobs_have_an_entry_per_token(llm: LLM) -> None:
    (output,) = llm.generate("def", SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True))
    assert output["logprobs"] is not None
    assert [e["token_id"] for e in output["logprobs"]] == output["token_ids"]
    assert all(len(e["top"]) == 2 and e["token_id"] in e["top"] for e in output["logprobs"])


def test_chat_renders_the_template_once(llm: LLM) -> None:
    messages = [{"role": "user", "content": "List three"}]
    ids = llm.encode_chat(messages)
    assert llm.chat(messages, GREEDY)["token_ids"] == llm.generate([ids], GREEDY)[0]["token_ids"]


def test_an_exception_in_a_step_leaves_the_object_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = llm.generate("def", GREEDY)
    scheduler = llm._ranks
    real_step, calls = scheduler.step, 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        real_step()

    monkeypatch.setattr(scheduler, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert llm.stats().num_running == 0
    assert llm.generate("def", GREEDY)[0]["text"] == wanted[0]["text"]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([""], GREEDY, r"prompts\[0\]: .*empty"),
        (["def", []], GREEDY, r"prompts\[1\]: is empty"),
        ([[5] * 96], GREEDY, r"prompts\[0\]: has 96 tokens; .* may have 96"),
        ([[5, 320]], GREEDY, r"token id 320: must be from 0 to 319"),
        (["a", "b"], [GREEDY], "has 1 entries for 2 prompts"),
        ([3.5], GREEDY, r"prompts\[0\]: must be a text or token ids"),
        ([[1.5]], GREEDY, r"prompts\[0\]: token id 1.5: must be an integer"),
        ([[10**4000]], GREEDY, r"prompts\[0\]: token id 10{20,}\.\.\.: must be from 0 to 319"),
        (["\ud800"], GREEDY, r"prompts\[0\]: is not UTF-8 text: it has the lone surrogate"),
        (
            ["a"],
            {"max_tokens": 2},
            "sampling_params: must be SamplingParams, not {'max_tokens': 2}",
        ),
        (
            ["a"],
            SamplingParams(logit_bias={320: 1.0}),
            "logit_bias of token id 320: must be from 0 to 319",
        ),
        (
            ["a"],
            SamplingParams(stop_token_ids=(319, 320)),
            r"stop_token_ids\[1\] 320: must be from 0 to 319",
        ),
        (
            [[5] * 96],
            SamplingParams(max_tokens=0, prompt_logprobs=1),
            "at least one is sampled, even with max_tokens 0",
        ),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(
    llm: LLM,
    prompts: Any,
    params: Any,
    message: str,  # Any: wrong types on purpose
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 2}, "sampling_params: must be SamplingParams, not {'max_tokens': 2}"),
        (SamplingParams(logit_bias={320: 1.0}), "logit_bias of token id 320: must be from 0 to"),
        (SamplingParams(stop_token_ids=(320,)), r"stop_token_ids\[0\] 320: must be from 0 to 319"),
    ],
)
def test_a_stream_refuses_bad_parameters_at_the_call(
    llm: LLM,
    params: Any,
    message: str,  # Any: wrong types on purpose
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.stream("def", params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 10**400),
        ("presence_penalty", 10**400),
        ("logit_bias", {1: 10**400}),
        ("ignore_eos", "no"),
        ("skip_special_tokens", None),
        ("top_p", 2),
        ("top_p", 0),
        ("top_k", 0),
        ("min_p", 1.5),
        ("n", 0),
        ("seed", 2**64),
        ("repetition_penalty", 0),
        ("logprobs", 99),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_sampling_params_name_the_field_and_the_value(
    field: str,
    value: Any,  # Any: wrong types on purpose
) -> None:
    with pytest.raises(RequestError, match=field.replace("stop_token_ids", "token id")):
        SamplingParams(**{field: value})


def test_wrong_settings_and_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="page_sise"):
        LLM("demo", page_sise=3)
    with pytest.raises(SettingsError, match="memory_ratio"):
        LLM("demo", memory_ratio=3)


def test_an_unknown_backend_lists_what_is_installed(tiny: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(PluginError, match=r"--attn zz.*torch"):
        LLM(str(tiny[0]), attn="zz")


def test_a_shut_down_llm_says_so(tiny: tuple[Path, PreTrainedModel]) -> None:
    llm = LLM(str(tiny[0]), num_page_override=32)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RequestError, match="was shut down"):
        llm.generate("def")
