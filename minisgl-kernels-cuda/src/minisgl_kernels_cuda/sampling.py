"""The batch sampler, as an op."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.errors import PluginError
from minisgl.ops.contract import SamplingHints, SamplingInputs
from minisgl_kernels_cuda.units import SAMPLE, Loader

TILE = 1024
_TILE_WARPS = 8
_ROW_THREADS = 1024
MAX_VOCAB = TILE * _ROW_THREADS


class Sampler:
    """``sample`` for logits of the model's element type, and of float32 for edited ones."""

    def __init__(self, loader: Loader, dtype: torch.dtype) -> None:
        """Load the kernels."""
        self._launches = {
            d: (kernels["sample_tiles"], kernels["sample_rows"])
            for d, kernels in ((d, loader.load(SAMPLE, d)) for d in {dtype, torch.float32})
        }

    def sample(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        is_all_greedy: bool,
        hints: SamplingHints | None = None,
    ) -> Tensor:
        """Choose one token per row; see `minisgl.ops.contract.Sample`.

        Each row's parameters are read on the device, so the hints are not needed.

        Raises:
            PluginError: The vocabulary has more than `MAX_VOCAB` tokens.
        """
        del hints
        num_rows, vocab_size = logits.shape
        if vocab_size > MAX_VOCAB:
            raise PluginError(
                f"--kernels cuda: vocabulary of {vocab_size} tokens; at most {MAX_VOCAB} are "
                "sampled, use --kernels torch"
            )
        if logits.dtype not in self._launches:
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        if not num_rows:
            return tokens
        num_tiles = -(-vocab_size // TILE)
        tiles = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits.device)
        tile_max = tiles.data_ptr()
        tile_sum = tile_max + 4 * num_rows * num_tiles
        temperature = 0 if is_all_greedy else inputs.temperature.data_ptr()
        scan, choose = self._launches[logits.dtype]
        row = (logits.data_ptr(), logits.stride(0), vocab_size, num_tiles, temperature)
        scan((-(-num_tiles // _TILE_WARPS), num_rows), (32 * _TILE_WARPS, 1), *row,
             tile_max, tile_sum)  # fmt: skip
        choose(
            (num_rows, 1), (_ROW_THREADS, 1), *row,
            inputs.top_k.data_ptr(), inputs.top_p.data_ptr(), inputs.min_p.data_ptr(),
            inputs.seeds.data_ptr(), inputs.positions.data_ptr(),
            tile_max, tile_sum, tokens.data_ptr(),
        )  # fmt: skip
        return tokens
