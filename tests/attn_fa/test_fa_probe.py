"""Which generation ``fa`` would take, decided without importing any."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from minisgl.plugin.spec import ProbeContext
from minisgl_attn_fa.plugin import ATTENTION, probe_attention
from tests.attn_fa.conftest import Install

HOPPER = ProbeContext(device="cuda", sm=90, dtype="bfloat16", head_dim=128)


@pytest.mark.parametrize(
    ("sm", "installed", "chosen"),
    [
        (90, ("2", "3", "4"), "flash_attn_interface"),
        (90, ("2", "sgl", "4"), "sgl_kernel.flash_attn"),
        (90, ("2", "4"), "flash_attn.cute"),
        (90, ("2",), "flash_attn.flash_attn_interface"),
        (80, ("2", "3", "4"), "flash_attn.flash_attn_interface"),
        (89, ("3", "4"), "flash_attn_interface"),
        (100, ("2", "3", "4"), "flash_attn.cute"),
        (100, ("2", "3"), "flash_attn.flash_attn_interface"),
        (120, ("2", "3", "4"), "flash_attn.flash_attn_interface"),
    ],
)
def test_the_best_generation_for_the_gpu_is_chosen(
    install: Install, sm: int, installed: tuple[str, ...], chosen: str
) -> None:
    install(*installed)
    answer = probe_attention(replace(HOPPER, sm=sm))
    assert answer.ok
    assert answer.reason.endswith(f" by {chosen}")


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (ProbeContext(), "needs an NVIDIA GPU"),
        (replace(HOPPER, sm=75), "does not run on compute capability 7.5"),
        (replace(HOPPER, dtype="float32"), "the model is float32"),
        (replace(HOPPER, head_dim=320), "head dimension 320: allowed are multiples of 8"),
        (replace(HOPPER, sm=120), "install flash-attn$"),
        (replace(HOPPER, sm=100), "install flash-attn-4 or flash-attn$|head dimension"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_why(
    install: Install, context: ProbeContext, reason: str
) -> None:
    install(*("3", "sgl"))
    answer = probe_attention(context)
    assert not answer.ok
    assert re.search(reason, answer.reason), answer.reason


def test_without_any_library_it_names_what_to_install() -> None:
    answer = probe_attention(HOPPER)
    assert not answer.ok
    assert "flash-attn-4" in answer.reason


def test_blackwell_has_fewer_head_dimensions(install: Install) -> None:
    install("4")
    assert probe_attention(replace(HOPPER, head_dim=192)).ok
    assert not probe_attention(replace(HOPPER, sm=100, head_dim=192)).ok


def test_the_page_rule_of_the_chosen_generation_is_reported(install: Install) -> None:
    install("2")
    capabilities = probe_attention(HOPPER).capabilities
    assert capabilities is not None
    assert capabilities.page_multiple == 256


def test_a_page_size_chooses_the_generation_that_allows_it(install: Install) -> None:
    install("2", "3")
    ampere = replace(HOPPER, sm=80)
    assert probe_attention(replace(ampere, page_size=16)).reason.startswith("FlashAttention 3")
    assert probe_attention(replace(ampere, page_size=256)).reason.startswith("FlashAttention 2")
    assert probe_attention(ampere).reason.startswith("FlashAttention 2")


@pytest.mark.parametrize(("generation", "is_first"), [("3", True), ("4", False)])
def test_hopper_prefills_by_generation_3_and_decodes_by_neither(
    install: Install, generation: str, is_first: bool
) -> None:
    install(generation)
    priorities = {
        phase: probe_attention(replace(HOPPER, phase=phase)).priority
        for phase in ("prefill", "decode")
    }
    # FlashInfer has 40 for prefill and 50 for decode.
    assert (priorities["prefill"] > 40) == is_first
    assert 0 < priorities["decode"] < 50


def test_probing_imports_nothing(install: Install) -> None:
    install("2", "3", "sgl", "4")
    probe_attention(HOPPER)
    heavy = {"flash_attn", "flash_attn_interface", "sgl_kernel"}
    assert {name for name in sys.modules if name.split(".")[0] in heavy} == set()


def test_the_spec_names_an_existing_factory() -> None:
    module, _, name = ATTENTION.factory.partition(":")
    assert hasattr(__import__(module, fromlist=[name]), name)
