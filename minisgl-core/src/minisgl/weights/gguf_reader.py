"""Weights of a GGUF file under their Hugging Face names, dequantised one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from minisgl.errors import ModelError
from minisgl.weights.contract import WeightReader
from minisgl.weights.dequantize import dequantize_rows
from minisgl.weights.gguf_config import GGUFModel
from minisgl.weights.gguf_file import GGUFFile

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTRAL = {"prefix": "block_sparse_moe", "gate": "w1", "down": "w2", "up": "w3"}
_QWEN_MOE = {"prefix": "mlp", "gate": "gate_proj", "down": "down_proj", "up": "up_proj"}

_LAYER_NAME = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<part>\w+)(?P<rest>(\.\d+)?\.(weight|bias))$")
_EXPERTS = re.compile(r"^ffn_(?P<which>gate|up|down)(?P<stacked>_exps)?$")
_IGNORED = re.compile(r"^(rope_freqs|rope_factors_long|rope_factors_short)\.weight$")

_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a Hugging Face tensor lies: some rows of a stored one."""

    stored: str
    shape: tuple[int, ...]
    first_row: int = 0
    permuted_heads: int = 0  # rows of this many heads are stored in interleaved order


class GGUFWeightReader(WeightReader):
    """Reads the tensors of an opened GGUF file."""

    def __init__(self, file: GGUFFile, model: GGUFModel) -> None:
        """Build the table of names.

        Args:
            file: The container.
            model: Its translated metadata.
        """
        self._file = file
        self._places: dict[str, _Place] = {}
        for name in file.tensors:
            if not _IGNORED.match(name):
                self._add(name, model)

    def names(self) -> Iterator[str]:
        """Yield the Hugging Face names in storage order; a name that we cannot map stays as is."""
        return iter(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._places[name].shape

    def where(self, name: str | None = None) -> str:
        """Return the file that holds a tensor."""
        place = self._places.get(name) if name is not None else None
        return str(self._file.tensors[place.stored].path if place else self._file.path)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Read and dequantise a part: float32, or the stored dtype where it is a plain one."""
        place = self._places[name]
        stored = self._file.tensors[place.stored]
        if len(place.shape) == 1:
            row = self._dequantize(place.stored, self._file.read_rows(place.stored, 0, 1))[0]
            if place.permuted_heads:
                row = row[torch.from_numpy(_stored_rows(place.shape[0], place.permuted_heads))]
            return row[index]
        wanted = np.arange(place.shape[0])[index[0]]
        if place.permuted_heads:
            wanted = _stored_rows(place.shape[0], place.permuted_heads)[wanted]
        if wanted.size == 0:
            return torch.empty(0, stored.shape[-1])[(slice(None), *index[1:])]
        low, high = int(wanted.min()), int(wanted.max()) + 1
        raw = self._file.read_rows(place.stored, place.first_row + low, place.first_row + high)
        if not np.array_equal(wanted, np.arange(low, high)):
            raw = raw[wanted - low]
        return self._dequantize(place.stored, raw)[(slice(None), *index[1:])]

    def close(self) -> None:
        """Close the files."""
        self._file.close()

    def _add(self, name: str, model: GGUFModel) -> None:
        """Enter the Hugging Face tensors that one stored tensor holds."""
        shape = self._file.tensors[name].shape
        match = _LAYER_NAME.match(name)
        if match is None:
            stem, _, kind = name.rpartition(".")
            self._enter(f"{_TOP[stem]}.{kind}" if stem in _TOP else name, _Place(name, shape))
            return
        prefix, part, rest = f"model.layers.{match['layer']}", match["part"], match["rest"]
        moe = _MIXTRAL if model.config["model_type"] == "mixtral" else _QWEN_MOE
        experts = _EXPERTS.match(part)
        if part == "ffn_gate_inp":
            self._enter(f"{prefix}.{moe['prefix']}.gate{rest}", _Place(name, shape))
        elif experts and experts["stacked"]:
            for i in range(shape[0]):
                place = _Place(name, shape[1:], first_row=i * shape[1])
                expert = f"{prefix}.{moe['prefix']}.experts.{i}.{moe[experts['which']]}{rest}"
                self._enter(expert, place)
        elif experts and rest.count(".") == 2:  # old files store one tensor per expert
            number, kind = rest[1:].split(".")
            expert = f"{prefix}.{moe['prefix']}.experts.{number}.{moe[experts['which']]}.{kind}"
            self._enter(expert, _Place(name, shape))
        else:
            heads = _permuted_heads(part, model)
            self._enter(
                f"{prefix}.{_LAYER[part]}{rest}" if part in _LAYER else name,
                _Place(name, shape, permuted_heads=heads),
            )

    def _enter(self, name: str, place: _Place) -> None:
        if name in self._places:
            raise ModelError(
                f"{self._file.path}: {place.stored} and {self._places[name].stored} are both {name}"
            )
        self._places[name] = place

    def _dequantize(self, stored: str, raw: np.ndarray) -> torch.Tensor:
        """Turn stored rows into numbers, ``[num_rows, width]``."""
        qtype = self._file.tensors[stored].qtype
        if qtype in _PLAIN_DTYPES:
            return torch.from_numpy(raw).view(_PLAIN_DTYPES[qtype])
        try:
            return torch.from_numpy(dequantize_rows(raw, qtype))
        except NotImplementedError as error:
            raise ModelError(
                f"{self._file.tensors[stored].path}: tensor {stored} is quantised as {qtype.name}, "
                "which the installed gguf package cannot read; a newer one may"
            ) from error


def _permuted_heads(part: str, model: GGUFModel) -> int:
    """Return how many heads of this tensor are stored for interleaved rope; 0 if none is."""
    if not model.has_permuted_qk or part not in ("attn_q", "attn_k"):
        return 0
    key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
    return int(model.config[key])


def _stored_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Return for each row in Hugging Face order the row that holds it.

    Hugging Face rotates the first half of a head against the second; GGUF files of this family
    keep the two rows of a pair side by side.
    """
    head_dim = num_rows // num_heads
    in_head = np.arange(head_dim).reshape(head_dim // 2, 2).T.ravel()
    return (np.arange(num_heads)[:, None] * head_dim + in_head).ravel()
