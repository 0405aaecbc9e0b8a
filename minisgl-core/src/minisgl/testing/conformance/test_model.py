"""What every architecture has to do; see `minisgl.models.contract`.

The model under test is the small one of `Model.tiny_config`, with random weights, over the torch
backends. Logits are of about 1 to 5; float32 ones may differ by 1e-3, which is far above the
rounding of a few layers and far below what any fault makes of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.errors import ModelError
from minisgl.layers.base import LoadTarget
from minisgl.models.config import ModelConfig
from minisgl.testing.attention_case import GARBAGE
from minisgl.testing.captured_step import CapturedStep
from minisgl.testing.model_case import (
    MAX_REQS,
    MAX_SEQ_LEN,
    MemoryReader,
    ModelCase,
    build_unloaded,
    random_checkpoint,
    read_config,
    tiny_config,
    whole_prompts,
)
from minisgl.testing.paged_batches import Step, newest
from minisgl.testing.selection import TestedBackend
from minisgl.testing.thread_ranks import ThreadComm, run_ranks

SEQ_LENS = (23, 1, 64, 8, 41)
TOLERANCE = 1e-3

Json = dict[str, Any]  # Any: free-form JSON


@pytest.fixture
def config_json(backend: TestedBackend) -> Json:
    return tiny_config(backend)


@pytest.fixture
def config(backend: TestedBackend, config_json: Json) -> ModelConfig:
    return read_config(backend, config_json)


@pytest.fixture
def checkpoint(backend: TestedBackend, config: ModelConfig) -> MemoryReader:
    return random_checkpoint(backend, config)


@pytest.fixture
def case(backend: TestedBackend, config: ModelConfig, checkpoint: MemoryReader) -> ModelCase:
    return ModelCase(backend, config, checkpoint)


def close(actual: Tensor, expected: Tensor, rule: str) -> None:
    """Compare logits."""
    assert actual.shape == expected.shape, f"{rule}: {list(expected.shape)}"
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=TOLERANCE, msg=lambda text: f"{rule}\n{text}"
    )


def test_every_parameter_is_loaded_and_only_once(
    backend: TestedBackend, config: ModelConfig
) -> None:
    model, parameters = build_unloaded(backend, config)
    assert parameters, "parameters are allocated by build.empty"
    with torch.inference_mode():
        for parameter in parameters:
            parameter.zero_()
        for _, target in model.load_targets():
            if target.dest is not None and not target.replaces:
                target.dest.add_(1)
    for parameter in parameters:
        shape = list(parameter.shape)
        assert parameter.max() < 2, f"no two load targets fill the parameter of shape {shape}"
        assert parameter.min() > 0, f"load_targets fills all of the parameter of shape {shape}"


def test_load_targets_are_consistent(backend: TestedBackend, config: ModelConfig) -> None:
    model, _ = build_unloaded(backend, config)
    for name, target in model.load_targets():
        assert all(name.split(".")), f"{name!r}: is a tensor's full name"
        if target.dest is not None:
            assert kept_shape(target) == tuple(target.dest.shape), (
                f"{name}: index selects a part of shape {list(target.dest.shape)}, that of dest"
            )


def kept_shape(target: LoadTarget) -> tuple[int, ...]:
    """Return the shape of what a target selects."""
    missing = len(target.shape) - len(target.index)
    index = target.index + (slice(None),) * missing
    sizes = zip(index, target.shape, strict=True)
    return tuple(len(range(*each.indices(size))) for each, size in sizes)


def test_the_model_says_what_it_is(case: ModelCase) -> None:
    model, config = case.model, case.config
    assert model.vocab_size == config.vocab_size, "vocab_size is that of the configuration"
    assert model.num_qo_heads % model.num_kv_heads == 0, "num_kv_heads divides num_qo_heads"
    assert len(model.layers_attention) == config.num_layers, "layers_attention names every layer"


def test_one_row_of_logits_for_each_sampled_token(case: ModelCase) -> None:
    is_sampled = [True, False, True, False, True]
    logits = case.prefill(whole_prompts(SEQ_LENS), is_sampled)
    rule = "forward returns one row for each entry of batch.sample_rows"
    assert logits.shape == (3, case.config.vocab_size), rule
    everything = case.prefill(whole_prompts(SEQ_LENS))
    close(logits, everything[[0, 2, 4]], rule)


def test_no_row_where_nothing_is_sampled(case: ModelCase) -> None:
    logits = case.prefill([Step(0, 0, 16), Step(3, 0, 5)], [False, False])
    assert logits.shape == (0, case.config.vocab_size), "a chunk that samples nothing has no logits"


def test_decode_continues_where_prefill_ended(case: ModelCase) -> None:
    case.prefill([Step(row, 0, seq_len) for row, seq_len in enumerate(SEQ_LENS)])
    for num_more in range(1, 4):
        longer = [seq_len + num_more for seq_len in SEQ_LENS]
        logits = case.decode(newest(longer))
        fresh = ModelCase.prefill(case, whole_prompts(longer))
        close(logits, fresh, "prefill and decode of a token give the logits of the whole prompt")


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 50])
def test_a_prompt_in_chunks_gives_the_same_as_in_one(case: ModelCase, num_tokens: int) -> None:
    expected = case.prefill([Step(2, 0, 61)])
    for start in range(0, 61, num_tokens):
        end = min(start + num_tokens, 61)
        logits = case.prefill([Step(2, start, end)], [end == 61])
    close(logits, expected, "a chunk sees the prefix that is in the pool")


def test_a_request_does_not_depend_on_its_neighbours(case: ModelCase) -> None:
    together = case.prefill(whole_prompts(SEQ_LENS))
    for row, seq_len in enumerate(SEQ_LENS):
        alone = case.prefill([Step(row, 0, seq_len)])
        close(alone[0], together[row], "a request's logits are those that it has alone")


def test_chunks_cached_prefixes_and_whole_prompts_share_a_batch(case: ModelCase) -> None:
    expected = case.prefill([Step(0, 0, 30), Step(1, 0, 12), Step(2, 0, 64)])
    case.prefill([Step(0, 0, 20), Step(2, 0, 63)], [False, False])
    logits = case.prefill([Step(0, 20, 30), Step(1, 0, 12), Step(2, 63, 64)])
    close(logits, expected, "requests of one batch may have prefixes of any length in the pool")


@pytest.mark.parametrize("padded_size", [4, 6])
def test_padding_changes_nothing(case: ModelCase, padded_size: int) -> None:
    case.prefill(whole_prompts(SEQ_LENS[:3]))
    steps = newest(seq_len + 1 for seq_len in SEQ_LENS[:3])
    expected = case.decode(steps)
    logits = case.decode(steps, padded_size)
    assert logits.shape[0] == padded_size, "decode has one row for each row of the padded batch"
    assert logits.isfinite().all(), "rows of padding hold finite numbers"
    close(logits[:3], expected, "padding changes no other row")


def test_positions_are_those_of_the_batch(case: ModelCase) -> None:
    case.prefill([Step(0, 0, 20)])
    batch = case.batches.decode([Step(0, 20, 21)])
    right = case.forward(batch)
    assert batch.positions is not None, "decode sets positions"
    batch.positions.add_(30)
    moved = case.forward(batch)
    assert not torch.allclose(right, moved, atol=TOLERANCE), (
        "forward takes positions from batch.positions"
    )


def test_the_longest_request_can_be_computed(case: ModelCase) -> None:
    case.prefill(whole_prompts([MAX_SEQ_LEN - 1] * MAX_REQS))
    logits = case.decode(newest([MAX_SEQ_LEN] * MAX_REQS))
    assert logits.isfinite().all(), "the model knows build.max_seq_len positions"


def test_keys_and_values_go_to_their_slots_and_nowhere_else(case: ModelCase) -> None:
    num_layers = len(case.model.layers_attention)
    pools = [
        pool for i in range(num_layers) for pool in (case.pool.k_slots(i), case.pool.v_slots(i))
    ]
    for pool in pools:
        pool.fill_(GARBAGE)
    steps = [Step(1, 0, 9), Step(4, 0, 30)]
    case.prefill(steps)
    written = torch.zeros(len(pools[0]), dtype=torch.bool, device=pools[0].device)
    written[torch.from_numpy(np.concatenate([case.batches.slots(step) for step in steps]))] = True
    for pool in pools:
        is_changed = (pool != GARBAGE).flatten(1).any(dim=1)
        assert torch.equal(is_changed, written), (
            "each layer stores keys and values of the batch's tokens in batch.out_loc"
        )


def test_forward_changes_nothing_but_the_pool(case: ModelCase) -> None:
    batch = case.batches.prefill(whole_prompts(SEQ_LENS))
    before = tensors_of(batch)
    first = case.forward(batch).clone()
    for name, tensor in tensors_of(batch).items():
        assert torch.equal(tensor, before[name]), f"forward does not change batch.{name}"
    assert torch.equal(case.forward(batch), first), "the same batch has the same logits again"


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return copies of a batch's tensors."""
    names = ("input_ids", "positions", "out_loc", "table_idx", "seq_lens", "sample_rows")
    found = {name: getattr(batch, name) for name in names}
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}


def test_a_captured_decode_step_can_be_replayed(case: ModelCase) -> None:
    case.prefill(whole_prompts(SEQ_LENS))
    attention = case.context.attn_backend
    attention.init_graph(4)
    fixed = case.batches.decode((), 4)
    fixed.reqs, fixed.host = [], None
    attention.prepare_for_capture(fixed)
    graph = CapturedStep(lambda: case.compute(fixed), torch.device(case.pool.k_slots(0).device))
    for num_more in (1, 2):
        steps = newest(seq_len + num_more for seq_len in SEQ_LENS[:3])
        expected = case.decode(steps)
        batch = case.batches.decode(steps, 4)
        for name in ("input_ids", "positions", "out_loc", "table_idx", "seq_lens"):
            getattr(fixed, name).copy_(getattr(batch, name))
            setattr(batch, name, getattr(fixed, name))
        attention.prepare_for_replay(batch)
        close(graph.replay()[:3], expected, "a replayed step reads the batch's fixed tensors alone")


def test_two_ranks_give_what_one_gives(
    backend: TestedBackend, config: ModelConfig, checkpoint: MemoryReader, case: ModelCase
) -> None:
    prompts, longer = whole_prompts(SEQ_LENS), newest(seq_len + 1 for seq_len in SEQ_LENS)
    expected = [case.prefill(prompts), case.decode(longer)]

    def work(comm: ThreadComm) -> list[Tensor]:
        rank = ModelCase(backend, config, checkpoint, comm=comm)
        return [rank.prefill(prompts), rank.decode(longer)]

    try:
        results = run_ranks(2, work)
    except ModelError as error:
        pytest.skip(str(error))
    for rank, logits in enumerate(results):
        for actual, wanted in zip(logits, expected, strict=True):
            close(actual, wanted, f"rank {rank} of two returns the logits of the whole model")


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_may_be_the_embedding(
    backend: TestedBackend, config_json: Json, is_tied: bool
) -> None:
    if "tie_word_embeddings" not in config_json:
        pytest.skip("its tiny_config does not name tie_word_embeddings")
    config = read_config(backend, config_json | {"tie_word_embeddings": is_tied})
    checkpoint = random_checkpoint(backend, config)
    logits = ModelCase(backend, config, checkpoint).prefill(whole_prompts(SEQ_LENS))
    tables = [name for name, t in checkpoint.weights.items() if t.shape[0] == config.vocab_size]
    rule = "tie_word_embeddings: {} means {} in the checkpoint"
    if is_tied:
        assert len(tables) == 1, rule.format("true", "one table of the vocabulary")
    else:
        assert len(tables) == 2, rule.format("false", "an embedding and a head")
    assert logits.std() > TOLERANCE, "the head multiplies by a loaded weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_types(
    backend: TestedBackend, config: ModelConfig, checkpoint: MemoryReader, dtype: torch.dtype
) -> None:
    rounded = MemoryReader({n: t.to(dtype).float() for n, t in checkpoint.weights.items()})
    expected = ModelCase(backend, config, rounded).prefill(whole_prompts(SEQ_LENS))
    logits = ModelCase(backend, config, rounded, dtype).prefill(whole_prompts(SEQ_LENS))
    assert logits.dtype == dtype, "logits are of build.dtype"
    # Experts are chosen by rounded numbers, so single values may be far off.
    similarity = torch.cosine_similarity(logits.float(), expected, dim=1)
    assert similarity.min() > 0.95, "half types give the same logits up to their rounding"
