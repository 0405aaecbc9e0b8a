"""The engine over a tiny model: against Hugging Face, with graphs, company, edits and seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minisgl.core import Req, SamplingParams
from minisgl.engine.backends import probe_context
from minisgl.engine.engine import Engine
from minisgl.errors import SettingsError
from minisgl.models.config import normalize_config
from minisgl.plugin.manager import PluginManager
from tests.core.engine.engine_harness import StepDriver, make_engine
from tests.tiny_models import TinyModel, save_tiny_model

GREEDY = SamplingParams(ignore_eos=True)
PROMPTS = [[5, 9, 200, 31], [7] * 11, [300, 12, 4, 4, 18, 90, 66]]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("engine_model")
    return folder, save_tiny_model(folder, TinyModel(arch="qwen3"))


@pytest.fixture(scope="module")
def engine(tiny: tuple[Path, PreTrainedModel]) -> Engine:
    return make_engine(tiny[0])


@pytest.fixture(scope="module")
def graph_engine(tiny: tuple[Path, PreTrainedModel]) -> Engine:
    return make_engine(tiny[0], cuda_graph_max_bs=4)


@pytest.fixture(scope="module")
def prefill_graph_engine(tiny: tuple[Path, PreTrainedModel]) -> Engine:
    return make_engine(tiny[0], prefill_graph_max_tokens=24)


def run(
    engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS
) -> list[list[int]]:
    driver = StepDriver(engine)
    reqs = [driver.admit(i, prompt, params) for i, prompt in enumerate(prompts)]
    return driver.generate(reqs, NUM_TOKENS)


def hf_greedy(
    model: PreTrainedModel,
    prompt: list[int],
    edit: Callable[[torch.Tensor, list[int]], torch.Tensor] = lambda logits, _: logits,
) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(edit(logits, ids).argmax()))
    return ids[len(prompt) :]


def test_greedy_tokens_equal_hugging_face(
    tiny: tuple[Path, PreTrainedModel], engine: Engine
) -> None:
    assert run(engine, GREEDY) == [hf_greedy(tiny[1], prompt) for prompt in PROMPTS]


def test_replayed_graphs_give_the_tokens_of_the_plain_path(
    engine: Engine, graph_engine: Engine
) -> None:
    # Three requests in a graph of four rows, so that padding takes part.
    assert run(graph_engine, GREEDY) == run(engine, GREEDY)


@pytest.mark.parametrize("field", ["token_loc", "positions", "seq_lens", "out_loc", "table_idx"])
def test_a_forgotten_copy_into_a_graph_buffer_shows(
    engine: Engine, graph_engine: Engine, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(engine, GREEDY)
    # The graph's buffer holds padding, and what is filled from now on is another one.
    slot = graph_engine._inputs.load_dummy(4)
    scratch = {name: array.copy() for name, array in slot.host[0].items()}
    monkeypatch.setitem(slot.host[0], field, scratch[field])
    assert run(graph_engine, GREEDY) != wanted


def test_captured_prefills_give_the_tokens_of_the_plain_path(
    engine: Engine, prefill_graph_engine: Engine
) -> None:
    # All together are 22 tokens in a graph of 24, so that padding takes part.
    assert run(prefill_graph_engine, GREEDY) == run(engine, GREEDY)
    long = [[3 + i % 7 for i in range(30)]]  # runs op by op
    assert run(prefill_graph_engine, GREEDY, long) == run(engine, GREEDY, long)


@pytest.mark.parametrize("field", ["input_ids", "positions", "out_loc", "sample_rows"])
def test_a_forgotten_copy_into_a_prefill_buffer_shows(
    engine: Engine, prefill_graph_engine: Engine, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(engine, GREEDY)
    prefill_graph_engine._inputs.load_dummy_prefill(24)
    slot = prefill_graph_engine._inputs.prefill_slot(24)
    scratch = {name: array.copy() for name, array in slot.host[0].items()}
    monkeypatch.setitem(slot.host[0], field, scratch[field])
    assert run(prefill_graph_engine, GREEDY) != wanted


def test_batches_above_the_largest_graph_run_without_one(graph_engine: Engine) -> None:
    prompts = [*PROMPTS, [8, 8], [9, 10, 11]]
    together = run(graph_engine, GREEDY, prompts)
    assert together == [run(graph_engine, GREEDY, [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("which", ["engine", "graph_engine", "prefill_graph_engine"])
def test_a_seeded_request_gives_the_same_tokens_in_any_company(
    which: str, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(which)
    params = SamplingParams(temperature=1.5, seed=7, top_p=0.9, top_k=50, ignore_eos=True)
    alone = run(engine, params, [PROMPTS[2]])[0]
    company = run(engine, params, PROMPTS)
    assert company[2] == alone
    assert len({tuple(tokens) for tokens in company}) == 3


def test_unseeded_requests_differ_and_touch_no_global_generator(engine: Engine) -> None:
    params = SamplingParams(temperature=2.0, ignore_eos=True)
    state = torch.get_rng_state()
    first, second = run(engine, params, [PROMPTS[0], PROMPTS[0]])
    assert first != second
    assert torch.equal(torch.get_rng_state(), state)


def test_greedy_and_sampled_rows_mix(engine: Engine) -> None:
    driver = StepDriver(engine)
    hot = SamplingParams(temperature=3.0, seed=1, ignore_eos=True)
    reqs = [driver.admit(0, PROMPTS[0], GREEDY), driver.admit(1, PROMPTS[1], hot)]
    mixed = driver.generate(reqs, NUM_TOKENS)
    assert mixed[0] == run(engine, GREEDY, [PROMPTS[0]])[0]
    assert mixed[1] != run(engine, GREEDY, PROMPTS[:2])[1]


@pytest.mark.parametrize("which", ["engine", "graph_engine", "prefill_graph_engine"])
def test_penalties_equal_their_definition(
    which: str, tiny: tuple[Path, PreTrainedModel], request: pytest.FixtureRequest
) -> None:
    params = SamplingParams(
        repetition_penalty=1.7, presence_penalty=0.8, frequency_penalty=0.6, ignore_eos=True
    )
    num_prompt = len(PROMPTS[0])

    def edit(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        logits = logits.clone()
        for token in set(ids):
            logits[token] *= 1.7 if logits[token] < 0 else 1 / 1.7
        for token in set(ids[num_prompt:]):
            logits[token] -= 0.8 + 0.6 * ids[num_prompt:].count(token)
        return logits

    got = run(request.getfixturevalue(which), params, [PROMPTS[0]])[0]
    assert got == hf_greedy(tiny[1], PROMPTS[0], edit)


def test_logit_bias_forces_and_forbids(engine: Engine) -> None:
    assert run(engine, SamplingParams(logit_bias={17: 100.0}), [PROMPTS[0]])[0] == [17] * 12
    plain = run(engine, GREEDY, [PROMPTS[0]])[0]
    banned = SamplingParams(logit_bias={plain[0]: -100.0}, ignore_eos=True)
    assert run(engine, banned, [PROMPTS[0]])[0][0] != plain[0]


def test_min_tokens_forbids_every_end_until_then(engine: Engine) -> None:
    eager_to_end = {2: 100.0}
    params = SamplingParams(logit_bias=eager_to_end, min_tokens=4)
    tokens = run(engine, params, [PROMPTS[0]])[0]
    assert 2 not in tokens[:4]
    assert tokens[4:] == [2] * (NUM_TOKENS - 4)


def test_logprobs_are_those_of_the_model(
    tiny: tuple[Path, PreTrainedModel], engine: Engine
) -> None:
    driver = StepDriver(engine)
    req = driver.admit(0, PROMPTS[1], SamplingParams(logprobs=3, logit_bias={17: 100.0}))
    result = driver.prefill([req]).wait().logprobs[0]
    with torch.no_grad():
        logits = tiny[1](torch.tensor([PROMPTS[1]])).logits[0, -1]
    expected = torch.log_softmax(logits, -1)
    top = expected.topk(3)
    assert result.token_id == 17
    assert result.logprob == pytest.approx(float(expected[17]), abs=1e-4)
    assert list(result.top_ids) == top.indices.tolist()
    assert list(result.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-4)


def test_a_logits_processor_sees_every_row(tiny: tuple[Path, PreTrainedModel]) -> None:
    def only_42(logits: torch.Tensor, reqs: Sequence[Req]) -> None:
        logits[: len(reqs), 42] = 1e9

    engine = make_engine(tiny[0], (only_42,), cuda_graph_max_bs=2)
    assert run(engine, GREEDY, PROMPTS[:2]) == [[42] * NUM_TOKENS] * 2


def test_a_logits_processor_works_on_edited_logits(tiny: tuple[Path, PreTrainedModel]) -> None:
    def forbid_17(logits: torch.Tensor, reqs: Sequence[Req]) -> None:
        logits[: len(reqs), 17] = float("-inf")

    engine = make_engine(tiny[0], (forbid_17,))
    wants_17 = SamplingParams(ignore_eos=True, logit_bias={17: 100.0})
    assert 17 not in run(engine, wants_17, PROMPTS[:1])[0]


def test_asking_for_logprobs_changes_no_token(engine: Engine) -> None:
    asking = SamplingParams(ignore_eos=True, logprobs=1)
    assert run(engine, asking) == run(engine, GREEDY)


def test_a_pool_that_holds_no_answer_is_refused(tiny: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(SettingsError, match="--num-pages 1: with --page-size 1 there is room"):
        make_engine(tiny[0], num_pages=1, page_size=1)


@pytest.mark.parametrize(("largest", "is_needed"), [(None, False), (0, False), (4, True)])
def test_probes_are_told_when_graphs_were_asked_for(
    tiny: tuple[Path, PreTrainedModel], largest: int | None, is_needed: bool
) -> None:
    keywords = {"model": str(tiny[0]), "cuda_graph_max_bs": largest}
    settings = PluginManager.bootstrap(env={}).load_settings(keywords, env={})
    config = normalize_config(tiny[1].config.to_dict())
    context = probe_context(settings, config, torch.device("cpu"), torch.float32)
    assert context.needs_graph_capture is is_needed


def test_two_engines_in_one_process_do_not_share_a_context(
    tiny: tuple[Path, PreTrainedModel], engine: Engine
) -> None:
    other = make_engine(tiny[0], page_size=8)
    mine, theirs = StepDriver(engine), StepDriver(other)
    a, b = mine.admit(0, PROMPTS[0], GREEDY), theirs.admit(0, PROMPTS[0], GREEDY)
    first = [mine.prefill([a]).wait().token_ids[0], theirs.prefill([b]).wait().token_ids[0]]
    second = [mine.decode([a]).wait().token_ids[0], theirs.decode([b]).wait().token_ids[0]]
    assert first[0] == first[1]
    assert second[0] == second[1]
