"""What a plugin's backend raises while a step is run is told from all else, and names it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.cli.main import main
from minisgl.engine.origin import ErrorOrigin
from minisgl.errors import BackendError, CapacityError
from minisgl.plugin.selection import SelectedBackend
from minisgl.plugin.spec import PLUGIN_API, Availability, BackendSpec
from tests.core.plugin.installed import Boot
from tests.tiny_models import TinyModel, save_tiny_model

Opening = Callable[..., LLM]
FLAGS = {"attention": "attn", "cache": "cache", "kernels": "kernels", "moe": "moe"}
PROMPT, PARAMS = [5, 9, 200, 31], SamplingParams(max_tokens=4, ignore_eos=True)


def subject_of(kind: str) -> str:
    return f"{kind} backend 'faulty' of acme-faulty 1.0"


def text_of(kind: str) -> str:
    return f"{subject_of(kind)}: a step failed: RuntimeError: the library is broken"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin_model")
    save_tiny_model(folder, TinyModel("qwen3_moe", vocab_size=320))
    return folder


@pytest.fixture
def opening(model: Path, boot: Boot) -> Opening:
    """Opens the model with the faulty backend of a kind."""

    def open_llm(kind: str, **settings: object) -> LLM:
        manager = boot("acme-faulty")
        name = "faulty,torch" if kind == "kernels" else "faulty"
        keywords = {"model": str(model), FLAGS[kind]: name, "num_pages": 64, "device": "cpu"}
        return LLM.from_settings(manager.load_settings(keywords | settings, env={}), manager)

    return open_llm


@pytest.mark.parametrize("kind", ["attention", "kernels", "moe"])
def test_a_request_that_a_backend_fails_says_whose_it_is(
    opening: Opening, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opening(kind) as llm:
        (completion,) = llm.generate([PROMPT], PARAMS)
    (choice,) = completion["choices"]
    assert (choice["finish_reason"], choice["error"]) == ("error", text_of(kind))
    assert "RuntimeError: the library\nis broken" in caplog.text


def test_a_backend_that_always_fails_is_named_by_the_error_that_ends_it(
    opening: Opening,
) -> None:
    with opening("moe") as llm:
        for _ in range(2):
            llm.generate([PROMPT], PARAMS)
        with pytest.raises(BackendError) as error:
            llm.generate([PROMPT], PARAMS)
    assert str(error.value) == text_of("moe")
    assert isinstance(error.value.__cause__, RuntimeError)


def test_a_cache_that_fails_is_named(opening: Opening) -> None:
    with opening("cache") as llm:
        with pytest.raises(BackendError) as error:
            llm.generate([PROMPT], PARAMS)
        assert str(error.value) == text_of("cache")


def test_the_command_names_the_backend_in_a_line_and_logs_the_traceback(
    model: Path,
    boot: Boot,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    boot("acme-faulty")
    assert main(["generate", str(model), "hello", "--cache=faulty", "--num-pages=64"]) == 1
    assert f"minisgl: {text_of('cache')}\n" in capsys.readouterr().err
    assert "RuntimeError: the library\nis broken" in caplog.text


def test_a_backend_that_fails_while_the_engine_warms_up_is_named(opening: Opening) -> None:
    with pytest.raises(BackendError) as error:
        opening("attention", cuda_graph_max_bs=2)
    assert str(error.value) == text_of("attention")


def test_what_a_moe_backend_allocates_is_there_before_the_pool_is_sized(
    opening: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    opening("moe").shutdown()
    heads = [record.message.partition(":")[0] for record in caplog.records]
    assert heads.index("took memory") < heads.index("KV cache")


def backend(key: str, factory: str) -> SelectedBackend:
    """Describe a backend by ``kind/distribution:name``."""
    kind, _, rest = key.partition("/")
    distribution, _, name = rest.partition(":")
    spec = BackendSpec(api=PLUGIN_API, factory=factory)
    return SelectedBackend(kind, name, distribution, "1.0", spec, Availability(ok=True), True)


def raise_through(modules: Sequence[str], error: BaseException) -> None:
    """Raise in the last of some modules, each of which calls the next."""
    called: Callable[[], None] | None = None
    for module in reversed(modules):
        scope: dict[str, Any] = {"__name__": module, "called": called, "error": error}
        body = "raise error" if called is None else "called()"
        exec(f"def function(): {body}", scope)
        called = scope["function"]
    assert called is not None
    called()


BACKENDS = (
    backend("attention/acme:a", "acme.attention:build"),
    backend("kernels/acme:a", "acme.kernels:build"),
    backend("cache/brand:b", "brand:build"),
    backend("comm/wires:w", "wires.group:build"),
    backend("model/brand-models:B", "brand_models.b.backend:B"),
    backend("moe/minisgl-core:torch", "minisgl.moe.torch_backend:TorchMoEBackend"),
)


@pytest.mark.parametrize(
    ("modules", "origin"),
    [
        (["minisgl.engine.engine", "acme.attention"], "attention backend 'a' of acme 1.0"),
        (["minisgl.x", "acme.kernels", "acme.helper", "torch"], "kernels backend 'a' of acme 1.0"),
        (
            ["acme.attention", "minisgl.ops.table", "acme.kernels"],
            "kernels backend 'a' of acme 1.0",
        ),
        (["acme.attention", "minisgl.ops.torch_ops"], "attention backend 'a' of acme 1.0"),
        (["minisgl.x", "acme.attention", "acme.kernels"], "attention backend 'a' of acme 1.0"),
        (["minisgl.x", "acme.helper"], "acme 1.0"),
        (["acme.attention", "minisgl.ops.table", "acme.helper"], "acme 1.0"),
        (["brand", "acme.attention"], "attention backend 'a' of acme 1.0"),
        (["acme.attention", "brand"], "cache backend 'b' of brand 1.0"),
        (["minisgl.scheduler.io", "wires.sockets"], "comm backend 'w' of wires 1.0"),
        (["minisgl.x", "brand_models.b.parts"], "model backend 'B' of brand-models 1.0"),
        (["brand_models.b.parts", "minisgl.layers.linear"], ""),
        (["brand_models.c.backend"], ""),
        (["brandy"], ""),
        (["minisgl.engine.engine", "minisgl.moe.torch_backend"], ""),
        (["torch"], ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_the_innermost_backend_of_the_traceback_is_named(modules: list[str], origin: str) -> None:
    wanted = BackendError if origin else RuntimeError
    with pytest.raises(wanted) as error, ErrorOrigin(BACKENDS):
        raise_through(modules, RuntimeError("no"))
    assert str(error.value) == (f"{origin}: a step failed: RuntimeError: no" if origin else "no")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "Triton Error [CUDA]: misaligned address",
        "cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "BatchPrefillWithPagedKVCache failed with error an illegal memory access was encountered",
    ],
)
def test_an_error_of_the_device_is_nobodys(text: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(text)), ErrorOrigin(BACKENDS):
        raise_through(["acme.attention"], RuntimeError(text))


@pytest.mark.parametrize("error", [CapacityError("full"), KeyboardInterrupt(), SystemExit(3)])
def test_errors_of_ours_and_interrupts_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, ErrorOrigin(BACKENDS):
        raise_through(["acme.attention"], error)
    assert raised.value is error


def test_an_attention_that_serves_all_phases_is_one_backend() -> None:
    with pytest.raises(BackendError, match="^attention backend 'a'"), ErrorOrigin(BACKENDS[:1] * 3):
        raise_through(["acme.helper"], RuntimeError("no"))


def test_what_the_core_raises_below_a_model_is_no_other_backends_of_its_package() -> None:
    backends = (backend("model/acme:M", "acme.model:M"), BACKENDS[0])
    with pytest.raises(RuntimeError, match="^no$"), ErrorOrigin(backends):
        raise_through(["minisgl.x", "acme.model", "minisgl.layers.linear"], RuntimeError("no"))
