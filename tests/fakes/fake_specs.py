"""The plugins' backends over fake libraries, for ``--backend KIND:tests.fakes.fake_specs:NAME``."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.ops.contract import KernelConfig, KernelSet
from minisgl.plugin.spec import PLUGIN_API, BackendSpec
from minisgl_attn_fa.generations import generations
from minisgl_attn_flashinfer.plugin import CAPABILITIES

_HOPPER = 90


def build_fi(config: AttentionConfig) -> AttentionBackend:
    """Build ``fi`` with a small workspace: the suite makes many."""
    # Imported when called: it imports the library, which a test has to put in place first.
    from minisgl_attn_flashinfer.backend import FlashInferBackend  # noqa: PLC0415
    from minisgl_attn_flashinfer.settings import FlashInferSettings  # noqa: PLC0415

    return FlashInferBackend(replace(config, settings=FlashInferSettings(workspace_mib=16)))


def build_fa(config: AttentionConfig) -> AttentionBackend:
    """Build ``fa``, which takes the generation that is installed, as on a Hopper GPU."""
    from minisgl_attn_fa import backend  # noqa: PLC0415 - as above

    with patch.object(backend, "compute_capability", return_value=_HOPPER):
        return backend.FlashAttentionBackend(config)


def build_fi_kernels(config: KernelConfig) -> KernelSet:
    """Build the kernel set as for a GPU; the fake's functions take tensors of a CPU."""
    from minisgl_attn_flashinfer.kernels import FlashInferKernelSet  # noqa: PLC0415 - as above

    return FlashInferKernelSet(replace(config, device=torch.device("cuda")))


def _fa_spec(version: str) -> BackendSpec:
    found = next(each for each in generations() if each.version == version)
    return BackendSpec(
        api=PLUGIN_API,
        factory="tests.fakes.fake_specs:build_fa",
        capabilities=found.capabilities(_HOPPER),
    )


FI = BackendSpec(
    api=PLUGIN_API, factory="tests.fakes.fake_specs:build_fi", capabilities=CAPABILITIES
)
FA2 = _fa_spec("2")
FA3 = _fa_spec("3")
FA4 = _fa_spec("4")
FI_KERNELS = BackendSpec(api=PLUGIN_API, factory="tests.fakes.fake_specs:build_fi_kernels")
