"""When ``native`` is picked, and what is said when it cannot be."""

from __future__ import annotations

import pytest

from minisgl import builtin
from minisgl.errors import PluginError
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ProbeContext

REASON = "no C++ compiler found (tried c++); install g++ or set CXX"


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """A manager on a machine with a compiler."""
    monkeypatch.setattr(builtin, "unavailable_reason", lambda: None)
    return PluginManager.bootstrap()


@pytest.mark.parametrize("kind", ["kernels", "attention"])
def test_the_best_on_a_cpu_is_native(manager: PluginManager, kind: str) -> None:
    context = ProbeContext(device="cpu", dtype="float32")
    if kind == "kernels":
        chosen = manager.resolve_chain(kind, "auto", context).chosen
        assert [backend.name for backend in chosen] == ["native", "torch"]
    else:
        picked = manager.resolve_attention("auto", context, preferred_page_size=16)
        assert (picked.prefill.name, picked.decode.name) == ("native", "native")


def test_without_a_compiler_auto_is_torch_and_says_why(
    manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "unavailable_reason", lambda: REASON)
    picked = manager.resolve_chain("kernels", "auto", ProbeContext())
    assert [backend.name for backend in picked.chosen] == ["torch"]
    assert f"native (minisgl-core): {REASON}" in picked.describe()


def test_without_a_compiler_asking_for_native_is_an_error(
    manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "unavailable_reason", lambda: REASON)
    with pytest.raises(PluginError, match=r"--kernels native.*no C\+\+ compiler found"):
        manager.resolve_chain("kernels", "native", ProbeContext())


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (ProbeContext(device="cpu", dtype="bfloat16"), "serves float32, the model is bfloat16"),
        (ProbeContext(device="cuda", sm=90, dtype="float32"), "runs on a CPU only"),
    ],
)
def test_other_devices_and_dtypes_are_refused(
    manager: PluginManager, context: ProbeContext, reason: str
) -> None:
    with pytest.raises(PluginError, match=reason):
        manager.resolve_chain("kernels", "native", context)
