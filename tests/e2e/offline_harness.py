"""Offline LLMs whose books are checked after every step, and Hugging Face to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from minisgl import LLM, SamplingParams
from minisgl.completion import Completion
from minisgl.config.sections import SchedulerSettings
from minisgl.parallel.ranks import LocalRank
from minisgl.scheduler.build import scheduler_config
from minisgl.scheduler.config import SchedulerConfig
from tests.tiny_models import TinyModel, save_tiny_model


class CheckedLLM(LLM):
    """Compares all books after every step."""

    def _step(self) -> None:
        super()._step()
        self.check_integrity()


def rank_of(llm: LLM) -> LocalRank:
    """Return the inside of an LLM that runs in this process alone."""
    assert isinstance(llm._ranks, LocalRank)
    return llm._ranks


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny model on disk and in Hugging Face's hands."""

    folder: Path
    hf_model: PreTrainedModel

    @classmethod
    def save(cls, folder: Path, spec: TinyModel) -> Tiny:
        return cls(folder, save_tiny_model(folder, spec))

    def open(self, **settings: Any) -> CheckedLLM:  # Any: settings of every type
        defaults = {"num_page_override": 512, "page_size": 4, "max_running_req": 8}
        return CheckedLLM(str(self.folder), **(defaults | settings))

    def open_daring(self, **settings: Any) -> CheckedLLM:  # Any: settings of every type
        """Let admission leave no room to grow, so that a tight pool leads to retractions."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minisgl.scheduler.build.scheduler_config", _daring_config)
            return self.open(**settings)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        return [hf_greedy(self.hf_model, prompt, num_tokens) for prompt in prompts]


def _daring_config(settings: SchedulerSettings, tp_size: int) -> SchedulerConfig:
    return replace(scheduler_config(settings, tp_size), headroom_tokens=0)


@torch.inference_mode()
def hf_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Let Hugging Face generate; end-of-sequence tokens are tokens like others."""
    model.generation_config.eos_token_id = None
    generate: Any = model.generate  # typed as a submodule by torch
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    output = generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    assert len(tokens) == num_tokens, "the reference stopped early"
    return tokens


def random_prompts(lengths: Sequence[int], vocab_size: int = 320, seed: int = 1) -> list[list[int]]:
    """Make prompts of random ids, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy_params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def ids_of(outputs: Sequence[Completion]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits or is held, and every page is free or cached."""
    llm.check_integrity()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
