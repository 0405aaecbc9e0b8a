"""Where the inputs of captured steps lie in the packed buffers: at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.engine.packed import Field, PackedLayout, Staging
from minisgl.engine.prefill_graph import MAX_SAMPLED
from minisgl.engine.row_params import param_fields, sampling_inputs
from minisgl.ops.contract import SamplingInputs

_I32, _I64 = torch.int32, torch.int64


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Device tensors of a step that the model does not need; views of the packed buffer.

    Attributes:
        write_loc: Flat token-pool index of each sampled token, int64; ``[num_sampled]``.
        sampling: Parameters of the rows that sample.
        token_loc: Decode only: flat token-pool index of each input token, int64; ``[num_reqs]``.
            The tokens of a prefill come from the host.
    """

    write_loc: torch.Tensor
    sampling: SamplingInputs
    token_loc: torch.Tensor | None = None


class DecodeSlot:
    """The views for one padded size: fixed addresses that a captured graph reads."""

    def __init__(self, size: int, staging: Staging) -> None:
        """Lay out a decode step of ``size`` rows at the start of the buffers."""
        fields = [
            Field("table_idx", _I32, size),
            Field("positions", _I32, size),
            Field("seq_lens", _I32, size),
            Field("out_loc", _I64, size),
            Field("token_loc", _I64, size),
            Field("write_loc", _I64, size),
            *param_fields(size),
        ]
        layout = PackedLayout(fields)
        self.num_bytes = layout.num_bytes
        self.host = [layout.arrays(memory) for memory in staging.memory]
        self.device = layout.views(staging.device)
        self.tensors = StepTensors(
            token_loc=self.device["token_loc"],
            write_loc=self.device["write_loc"],
            sampling=sampling_inputs(self.device, self.device["seq_lens"]),
        )


class PrefillSlot:
    """What a captured prefill of one padded size reads, at fixed addresses."""

    def __init__(self, size: int, staging: Staging) -> None:
        """Lay out a step of ``size`` tokens at the start of the buffers."""
        layout = prefill_layout(size, MAX_SAMPLED)
        self.num_bytes = layout.num_bytes
        self.host = [layout.arrays(memory) for memory in staging.memory]
        self.device = layout.views(staging.device)


def prefill_layout(num_tokens: int, num_rows: int) -> PackedLayout:
    """Place what the model reads of a prefill, ``num_rows`` of whose logits are wanted."""
    return PackedLayout(
        [
            Field("input_ids", _I32, num_tokens),
            Field("positions", _I32, num_tokens),
            Field("out_loc", _I64, num_tokens),
            Field("sample_rows", _I64, num_rows),
        ]
    )
