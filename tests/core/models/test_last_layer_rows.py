"""Behind the last layer's attention a prefill computes only the tokens whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl.native.library import unavailable_reason
from minisgl.ops.contract import KernelConfig, KernelSet
from minisgl.ops.native_set import NativeKernelSet
from minisgl.ops.table import build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet
from minisgl.testing.model_case import whole_prompts
from minisgl.testing.paged_batches import newest
from minisgl.testing.selection import BackendSelector
from tests.core.cli.new_plugins import write_plugin
from tests.core.models.model_harness import CPU, MODELS
from tests.core.models.row_log import RowLog
from tests.packaging.workspace import ROOT

SEQ_LENS = (23, 1, 64, 8)
DENSE = [name for name in MODELS if name not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")]
OUT_OF_TREE = ("example", "template")
EXAMPLE = ROOT / "examples/plugins/minisgl-model-gemma3"
FLOAT32 = KernelConfig(CPU, torch.float32)

needs_native = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native code: {unavailable_reason()}"
)


def watch(model: str, *sets: KernelSet) -> RowLog:
    """Build a model over kernel sets, or over the torch set."""
    (backend,) = BackendSelector("cpu").select([f"model:{model}"])
    named = [(type(each).__name__, each) for each in sets or (TorchKernelSet(FLOAT32),)]
    return RowLog(backend, build_kernel_table(named))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `minisgl plugins new` writes it, of a name that no other test uses."""
    return write_plugin(tmp_path_factory.mktemp("template"), "model", "RowsForCausalLM")


@pytest.fixture(params=[*MODELS, *OUT_OF_TREE])
def log(request: pytest.FixtureRequest, template: Path, monkeypatch: pytest.MonkeyPatch) -> RowLog:
    """A model of the core, of the example, or of the template."""
    name: str = request.param
    if name not in OUT_OF_TREE:
        return watch(name)
    folder, spec = (EXAMPLE, "GEMMA3") if name == "example" else (template, "MODEL")
    (package,) = (path.parent for path in folder.glob("src/*/plugin.py"))
    monkeypatch.syspath_prepend(str(package.parent))
    return watch(f"{package.name}.plugin:{spec}")


def check(log: RowLog, num_rows: int) -> None:
    """Every op behind the last attention had so many rows: o_proj, the MLP's two and the head."""
    assert len(log.rows) >= 4
    assert set(log.rows) == {num_rows}


def test_only_the_sampled_tokens_are_computed_behind_the_last_attention(log: RowLog) -> None:
    log.case.prefill(whole_prompts(SEQ_LENS), [True, False, True, True])
    check(log, 3)


def test_a_chunk_that_samples_nothing_ends_with_the_last_attention(log: RowLog) -> None:
    log.case.prefill(whole_prompts(SEQ_LENS), [False] * 4)
    check(log, 0)


def test_a_decode_step_computes_all_its_rows(log: RowLog) -> None:
    log.case.prefill(whole_prompts(SEQ_LENS))
    log.case.decode(newest(seq_len + 1 for seq_len in SEQ_LENS), padded_size=6)
    check(log, 6)


def logits_of(log: RowLog, rows: Sequence[int]) -> Tensor:
    """Compute whole prompts, and the logits of some of the tokens."""
    batch = log.case.batches.prefill(whole_prompts(SEQ_LENS))
    batch.sample_rows = torch.tensor(rows)
    logits = log.case.forward(batch)
    check(log, len(rows))
    return logits


def narrowed_and_whole(log: RowLog) -> tuple[Tensor, Tensor]:
    """Compute some rows alone, and among all others; also in no order, and one twice."""
    rows = [95, 3, 22, 23, 3]
    return logits_of(log, rows), logits_of(log, range(sum(SEQ_LENS)))[rows]


def test_the_wanted_rows_are_those_of_a_whole_step(log: RowLog) -> None:
    narrowed, whole = narrowed_and_whole(log)
    torch.testing.assert_close(narrowed, whole, rtol=0, atol=1e-4)  # sums in another order


@needs_native
@pytest.mark.parametrize("model", DENSE)
def test_native_kernels_give_the_bits_of_a_whole_step(model: str) -> None:
    log = watch(model, NativeKernelSet(FLOAT32), TorchKernelSet(FLOAT32))
    assert torch.equal(*narrowed_and_whole(log))
