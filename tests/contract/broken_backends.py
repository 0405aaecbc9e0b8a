"""Backends of other kinds with one fault each, for the suites to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.core import Batch
from minisgl.moe.contract import MoEConfig
from minisgl.moe.torch_backend import TorchMoEBackend
from minisgl.ops.contract import SamplingHints, SamplingInputs
from minisgl.ops.torch_set import TorchKernelSet
from minisgl.plugin.spec import PLUGIN_API, BackendSpec


class IgnoresTheWindow(TorchAttentionBackend):
    """Every layer sees everything."""

    def __init__(self, config: AttentionConfig) -> None:
        layers = tuple(replace(layer, window_left=-1) for layer in config.layers)
        super().__init__(replace(config, layers=layers))


class MistakesTheWindowByOne(TorchAttentionBackend):
    """Takes ``window_left`` for the size of the window."""

    def __init__(self, config: AttentionConfig) -> None:
        layers = tuple(
            replace(layer, window_left=max(layer.window_left - 1, -1)) for layer in config.layers
        )
        super().__init__(replace(config, layers=layers))


class UsesOneScale(TorchAttentionBackend):
    """Every layer has the scale of the first."""

    def __init__(self, config: AttentionConfig) -> None:
        scale = config.layers[0].sm_scale
        layers = tuple(replace(layer, sm_scale=scale) for layer in config.layers)
        super().__init__(replace(config, layers=layers))


class ScalesTheQueriesInPlace(TorchAttentionBackend):
    """Leaves q changed."""

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, layer_id, batch)
        q.mul_(0.5)
        return out


class ForgetsTheNewestToken(TorchAttentionBackend):
    """A decode step does not see the token that it computes."""

    def prepare_metadata(self, batch: Batch) -> None:
        host = batch.host
        if batch.is_decode and host is not None:
            shorter = (host.seq_lens - 1).clip(min=1)
            batch.host = replace(host, seq_lens=shorter)
        super().prepare_metadata(batch)
        batch.host = host


class PlansOnceForAllReplays(TorchAttentionBackend):
    """A captured step keeps the lengths of its capture."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self._captured: dict[int, Batch] = {}

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        assert batch.seq_lens is not None
        self._captured[id(batch)] = replace(batch, seq_lens=batch.seq_lens.clone())

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, layer_id, self._captured.get(id(batch), batch))


class ReadsOnePageTooFar(TorchAttentionBackend):
    """Takes each page from the next column of the page table."""

    def __init__(self, config: AttentionConfig) -> None:
        table = config.context.page_table
        config.context.page_table = table.roll(-1, dims=1)
        super().__init__(config)

    def prepare_metadata(self, batch: Batch) -> None:
        host = batch.host
        assert host is not None
        batch.host = replace(host, page_table=np.roll(host.page_table, -1, axis=1))
        super().prepare_metadata(batch)
        batch.host = host


class KeepsItsPlanInTheClass(TorchAttentionBackend):
    """The newest plan of the process is everybody's."""

    plans: ClassVar[list[Batch]] = []

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        self.plans[:] = [batch]

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, layer_id, self.plans[0] if self.plans else batch)


class ReadsWholeVectors(TorchAttentionBackend):
    """Leaves out what a head has beyond a multiple of 16 numbers."""

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        cut = q.clone()
        cut[..., q.shape[-1] // 16 * 16 :] = 0
        return super().forward(cut, layer_id, batch)


class WritesWhereItLikes(TorchAttentionBackend):
    """Returns what it should write."""

    def forward_into(self, out: Tensor, q: Tensor, layer_id: int, batch: Batch) -> None:
        super().forward(q, layer_id, batch)


class RefusesInItsOwnWords(TorchAttentionBackend):
    """Its error is not one that a caller expects."""

    def __init__(self, config: AttentionConfig) -> None:
        if config.head_dim > 256:
            raise KeyError(config.head_dim)
        super().__init__(config)


class SaysThatItCaptures(AttentionBackend):
    """Its spec promises graphs, and it has no method for them."""

    def __init__(self, config: AttentionConfig) -> None:
        self._inner = TorchAttentionBackend(config)

    def prepare_metadata(self, batch: Batch) -> None:
        self._inner.prepare_metadata(batch)

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return self._inner.forward(q, layer_id, batch)


CAPTURING_SPEC = BackendSpec(PLUGIN_API, f"{__name__}:SaysThatItCaptures")


class BrokenKernels(TorchKernelSet):
    """The torch set with some ops replaced."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        raise NotImplementedError

    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return {**super().ops(), **self.changed()}


class AddsNoEps(BrokenKernels):
    """A norm that forgets epsilon."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        good = super(BrokenKernels, self).ops()["rms_norm"]
        return {"rms_norm": lambda x, weight, eps: good(x, weight, 0.0)}


class RotatesPairs(BrokenKernels):
    """Rotates neighbours instead of halves."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        good = super(BrokenKernels, self).ops()["rope"]

        def rope(q: Tensor, k: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
            half = cache.shape[1] // 2

            def mixed(x: Tensor, *, is_back: bool) -> Tensor:
                head, rest = x[..., : 2 * half], x[..., 2 * half :]
                shape = (half, 2) if not is_back else (2, half)
                return torch.cat((head.unflatten(-1, shape).mT.flatten(-2), rest), dim=-1)

            rotated = good(mixed(q, is_back=False), mixed(k, is_back=False), positions, cache)
            return tuple(mixed(x, is_back=True) for x in rotated)

        return {"rope": rope}


class StoresOneSlotTooFar(BrokenKernels):
    """Off by one."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        good = super(BrokenKernels, self).ops()["store_kv"]

        def store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, out_loc: Tensor) -> None:
            good(k, v, k_pool, v_pool, (out_loc + 1) % len(k_pool))

        return {"store_kv": store}


class NormsInPlace(BrokenKernels):
    """Leaves the normed tensor where the input was."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        good = super(BrokenKernels, self).ops()["rms_norm"]
        return {"rms_norm": lambda x, weight, eps: x.copy_(good(x, weight, eps))}


class LosesTheResidual(BrokenKernels):
    """Gives the input back in place of the sum."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        good = super(BrokenKernels, self).ops()["fused_add_rms_norm"]

        def norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            before = x.clone()
            return good(x, residual, weight, eps)[0], before

        return {"fused_add_rms_norm": norm}


class TakesOneGeluForTheOther(BrokenKernels):
    """Has the approximation alone."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        return {"gelu_and_mul": super(BrokenKernels, self).ops()["gelu_tanh_and_mul"]}


class LaunchesAnEmptyGrid(BrokenKernels):
    """Has a block for each row, and the driver refuses a launch of none."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        good = super(BrokenKernels, self).ops()["silu_and_mul"]

        def silu_and_mul(x: Tensor) -> Tensor:
            if not len(x):
                raise RuntimeError("invalid configuration argument")
            result: Tensor = good(x)
            return result

        return {"silu_and_mul": silu_and_mul}


class LooksUpWhatOthersHave(BrokenKernels):
    """Takes the nearest row for one that another rank has."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        def embedding(ids: Tensor, weight: Tensor, vocab_start: int = 0) -> Tensor:
            return weight[(ids.long() - vocab_start).clamp(0, len(weight) - 1)]

        return {"embedding": embedding}


class BrokenSampler(BrokenKernels):
    """Calls the good sampler with something changed."""

    def changed(self) -> dict[str, Callable[..., Any]]:
        good = super(BrokenKernels, self).ops()["sample"]

        def sample(
            logits: Tensor,
            inputs: SamplingInputs,
            is_all_greedy: bool,
            hints: SamplingHints | None = None,
        ) -> Tensor:
            result: Tensor = good(logits, self.altered(inputs), is_all_greedy, hints)
            return result

        return {"sample": sample}

    def altered(self, inputs: SamplingInputs) -> SamplingInputs:
        raise NotImplementedError


class IgnoresTopP(BrokenSampler):
    """Keeps all tokens that top-k keeps."""

    def altered(self, inputs: SamplingInputs) -> SamplingInputs:
        return inputs._replace(top_p=torch.ones_like(inputs.top_p))


class DrawsByRow(BrokenSampler):
    """The draw depends on where a row stands."""

    def altered(self, inputs: SamplingInputs) -> SamplingInputs:
        return inputs._replace(seeds=inputs.seeds + torch.arange(len(inputs.seeds)))


class UsesTheGlobalGenerator(BrokenSampler):
    """The draw depends on what else was drawn in the process."""

    def altered(self, inputs: SamplingInputs) -> SamplingInputs:
        return inputs._replace(seeds=torch.randint(0, 1 << 40, inputs.seeds.shape))


class NeverRenormalizes(TorchMoEBackend):
    """Ignores ``is_renormalized``."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(replace(config, is_renormalized=False))


class NormalizesItsInput(TorchMoEBackend):
    """Leaves the logits changed."""

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
    ) -> Tensor:
        router_logits.sub_(router_logits.amax(dim=-1, keepdim=True))
        return super().forward(hidden_states, router_logits, gate_up_weight, down_weight)


class SharesItsOutput(TorchMoEBackend):
    """All backends of the process write into one buffer."""

    buffers: ClassVar[dict[int, Tensor]] = {}

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
    ) -> Tensor:
        out = super().forward(hidden_states, router_logits, gate_up_weight, down_weight)
        size = out.shape[1]
        buffer = self.buffers.setdefault(size, torch.empty(4096, size, dtype=out.dtype))
        return buffer[: len(out)].copy_(out)


class RemembersTheRouter(TorchMoEBackend):
    """Chooses experts once for each place in memory, as a graph would that captured the choice."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self._seen: dict[int, Tensor] = {}

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
    ) -> Tensor:
        chosen = self._seen.setdefault(router_logits.data_ptr(), router_logits.clone())
        return super().forward(hidden_states, chosen, gate_up_weight, down_weight)


class RoutesAtLeastOne(TorchMoEBackend):
    """Pads the tokens to a whole block, and cuts nothing off where there are none."""

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
    ) -> Tensor:
        if not len(hidden_states):
            hidden_states = hidden_states.new_zeros(1, hidden_states.shape[1])
            router_logits = router_logits.new_zeros(1, router_logits.shape[1])
        return super().forward(hidden_states, router_logits, gate_up_weight, down_weight)


class SwapsGateAndUp(TorchMoEBackend):
    """Takes the second half for the gate."""

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
    ) -> Tensor:
        gate, up = gate_up_weight.chunk(2, dim=1)
        swapped = torch.cat((up, gate), dim=1)
        return super().forward(hidden_states, router_logits, swapped, down_weight)
