from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest

from minisgl.errors import PluginError
from minisgl.plugin.spec import ProbeContext
from tests.core.plugin.installed import Boot

# Of a type that the native backends refuse, so that no compiler decides what is picked.
CPU = ProbeContext(dtype="bfloat16")


def test_one_name_serves_both_phases(boot: Boot) -> None:
    chosen = boot("acme-good").resolve_attention("good", CPU)
    assert chosen.prefill.key == chosen.decode.key == "attention/acme-good:good"
    assert chosen.prefill.is_named
    assert (chosen.prefill.distribution, chosen.prefill.version) == ("acme-good", "1.0")


def test_choosing_imports_the_code_only_when_it_is_built(boot: Boot) -> None:
    chosen = boot("acme-good").resolve_attention("good", CPU)
    assert "acme_good_backend" not in sys.modules
    assert chosen.prefill.build("config") == ("built", "config")


def test_an_alias_means_the_same_backend(boot: Boot) -> None:
    assert boot("acme-good").resolve_attention("goodie", CPU).prefill.name == "good"


def test_a_pair_is_prefill_then_decode(boot: Boot) -> None:
    chosen = boot("acme-good").resolve_attention("torch,good", CPU)
    assert (chosen.prefill.name, chosen.decode.name) == ("torch", "good")


def test_the_page_size_is_raised_to_one_that_both_take(boot: Boot) -> None:
    plugins = boot("acme-good")
    assert plugins.resolve_attention("torch,good", CPU).page_size == 16
    assert plugins.resolve_attention("torch", CPU).page_size == 1
    assert plugins.resolve_attention("good", CPU, preferred_page_size=32).page_size == 64


def test_a_page_size_that_the_user_set_is_kept(boot: Boot) -> None:
    context = ProbeContext(page_size=64)
    assert boot("acme-good").resolve_attention("torch,good", context).page_size == 64


def test_a_page_size_that_a_named_backend_cannot_take_is_an_error(boot: Boot) -> None:
    wanted = "good of acme-good 1.0 does not work here: wants a page size of 16 or 64, not 8"
    with pytest.raises(PluginError, match=wanted):
        boot("acme-good").resolve_attention("torch,good", ProbeContext(page_size=8))


def test_two_backends_without_a_shared_page_size_are_an_error(boot: Boot) -> None:
    wants = (
        "--attn good,acme-twin-a:twin: no page size suits both: "
        "good wants a page size of 16 or 64, twin wants a page size of 32"
    )
    with pytest.raises(PluginError, match=wants):
        boot("acme-good", "acme-twin-a").resolve_attention("good,acme-twin-a:twin", CPU)


def test_auto_takes_the_highest_priority_and_says_why_not_the_others(boot: Boot) -> None:
    chosen = boot("acme-good").resolve_attention("auto", CPU)
    assert chosen.prefill.name == chosen.decode.name == "good"
    assert not chosen.prefill.is_named
    assert "torch (minisgl-core): priority 0, and good has 7" in map(str, chosen.refused)
    assert chosen.describe().startswith(
        "attention auto: prefill good (acme-good 1.0), decode good (acme-good 1.0), page size 16"
    )


def test_auto_heeds_a_page_size_that_the_user_set(boot: Boot) -> None:
    chosen = boot("acme-good").resolve_attention("auto", replace(CPU, page_size=8))
    assert chosen.prefill.name == "torch"
    reasons = {refusal.name: refusal.reason for refusal in chosen.refused}
    assert reasons["good"] == "wants a page size of 16 or 64, not 8"


def test_auto_takes_a_partner_that_shares_a_page_size(boot: Boot) -> None:
    plugins = boot("acme-good", "acme-twin-a")
    chosen = plugins.resolve_attention("auto,twin", CPU)
    assert (chosen.prefill.name, chosen.page_size) == ("twin", 32)
    assert any("no page size suits both" in refusal.reason for refusal in chosen.refused)


def test_a_third_name_serves_large_decode_batches(boot: Boot) -> None:
    chosen = boot("acme-good").resolve_attention("torch,good,torch", CPU)
    assert [chosen.decode.name, chosen.large_decode.name] == ["good", "torch"]
    assert chosen.names == "torch,good,torch"
    assert "decode good (acme-good 1.0), beyond 8 requests torch" in chosen.describe()


def test_two_names_leave_all_decode_batches_to_the_second(boot: Boot) -> None:
    chosen = boot("acme-good").resolve_attention("torch,good", CPU)
    assert chosen.large_decode.key == chosen.decode.key
    assert chosen.names == "torch,good"


def test_auto_asks_again_for_large_decode_batches(boot: Boot) -> None:
    chosen = boot("acme-few").resolve_attention("auto", CPU)
    assert chosen.decode.name == "few"
    assert chosen.large_decode.key == chosen.prefill.key != chosen.decode.key


def test_two_distributions_with_one_name_must_be_told_apart(boot: Boot) -> None:
    plugins = boot("acme-twin-a", "acme-twin-b")
    with pytest.raises(PluginError, match="both offer 'twin'; say .*acme-twin-a:twin") as caught:
        plugins.resolve_attention("twin", CPU)
    assert "acme-twin-b:twin" in str(caught.value)
    assert plugins.resolve_attention("acme_twin_b:twin", CPU).prefill.build(None) == "b"


def test_an_unknown_name_lists_what_is_and_what_could_be_installed(boot: Boot) -> None:
    plugins = boot("acme-good", plugins="acme-good")
    with pytest.raises(PluginError) as caught:
        plugins.resolve_attention("torch,zz", CPU)
    assert str(caught.value) == (
        "--attn torch,zz: no installed plugin offers 'zz'; installed: good, native, torch; can be "
        "installed: fa (pip install minisgl-attn-fa), fi (pip install minisgl-attn-flashinfer)"
    )


@pytest.mark.parametrize(
    ("kind", "name", "distribution"),
    [("moe", "fused", "minisgl-moe-triton"), ("kernels", "cuda", "minisgl-kernels-cuda")],
)
def test_a_known_name_that_is_missing_names_its_distribution(
    boot: Boot, kind: str, name: str, distribution: str
) -> None:
    plugins = boot(plugins="minisgl-core")
    provider = rf"{name} \(pip install {distribution}\)|{distribution} offers it"
    with pytest.raises(PluginError, match=provider):
        plugins.resolve_chain(kind, name, CPU)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("torch,", "must be names separated by single commas"),
        ("torch,torch,torch,torch", "takes one name, or PREFILL,DECODE"),
        ("nobody:torch", "no installed distribution 'nobody' offers attention backends"),
    ],
)
def test_a_choice_that_cannot_be_read_is_an_error(boot: Boot, choice: str, reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        boot().resolve_attention(choice, CPU)


def test_a_named_backend_whose_probe_says_no_is_an_error_with_its_reason(boot: Boot) -> None:
    message = "--cache says-no: says-no of acme-bad-probe 1.0 does not work here: needs a moon"
    with pytest.raises(PluginError, match=message):
        boot("acme-bad-probe").resolve("cache", "says-no", CPU)


def test_auto_passes_over_probes_that_say_no_or_raise(boot: Boot) -> None:
    chosen = boot("acme-bad-probe").resolve("cache", "auto", CPU, is_dry=True)
    assert chosen.one.name == "radix"
    reasons = {refusal.name: refusal.reason for refusal in chosen.refused}
    assert reasons["says-no"] == "needs a moon"
    assert reasons["explodes"] == "its probe failed: ZeroDivisionError: half a GPU"


def test_auto_passes_over_broken_plugins_with_a_warning(
    boot: Boot, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plugins = boot("acme-good", "acme-future")
        assert plugins.resolve_attention("auto", CPU).prefill.name == "good"
    messages = [message for message in caplog.messages if "acme-future" in message]
    assert len(messages) == 1
    assert "--attn auto: passed over: attention backend 'future' of acme-future 1.0" in messages[0]


def test_auto_passes_over_code_that_cannot_be_imported(
    boot: Boot, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = boot("acme-good", "acme-broken-factory").resolve_attention("auto", CPU)
    assert chosen.prefill.name == chosen.decode.name == "good"
    assert sum("libcudart.so.12" in message for message in caplog.messages) == 1


def test_code_of_a_named_backend_that_cannot_be_imported_is_an_error(boot: Boot) -> None:
    chosen = boot("acme-broken-factory").resolve_attention("broken", CPU)
    with pytest.raises(PluginError, match=r"'broken' of acme-broken-factory 1.0: OSError: libcud"):
        chosen.prefill.load()


def test_a_chain_keeps_the_order_that_was_asked_for(boot: Boot) -> None:
    chain = boot("acme-bad-probe").resolve_chain("cache", "naive,radix,naive", CPU)
    assert [backend.name for backend in chain.chosen] == ["naive", "radix"]


def test_auto_in_a_chain_adds_the_rest_by_priority(boot: Boot) -> None:
    plugins = boot(plugins="minisgl-core")
    chain = plugins.resolve_chain("cache", "naive,auto", CPU, is_dry=True)
    assert [(backend.name, backend.is_named) for backend in chain.chosen] == [
        ("naive", True),
        ("radix", False),
    ]


def test_model_sources_are_asked_in_a_fixed_order(boot: Boot) -> None:
    chain = boot(plugins="minisgl-core").resolve_chain("source", "auto", CPU, is_dry=True)
    names = [backend.name for backend in chain.chosen]
    assert names[:4] == ["demo", "gguf", "local", "hub"]


def test_a_kind_that_takes_one_backend_refuses_a_chain(boot: Boot) -> None:
    with pytest.raises(PluginError, match="--cache radix,naive: takes one name"):
        boot().resolve("cache", "radix,naive", CPU)
