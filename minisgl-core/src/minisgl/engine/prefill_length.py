"""How many prompt tokens a step takes: what ``--max-prefill-length auto`` stands for.

A product runs in tiles of 128 rows and more, spread over the multiprocessors of a GPU. With 128
rows for each of them, all products of a model divide evenly, whatever their widths. A large model
gains nothing by that, and decodes would wait long for the end of such a step.
"""

from __future__ import annotations

import torch

from minisgl.distributed.contract import Communicator
from minisgl.models.config import ModelConfig

MIN_PREFILL_LENGTH = 8192
"""Tokens of a step on a CPU, and on a GPU at least."""

FLOP_PER_S = 650e12
"""What the products of an H200 reach."""

_TOKENS_PER_MULTIPROCESSOR = 128
_MAX_STEP_S = 0.1  # that a decode may wait; attention comes on top, and grows with the context


def resolve_prefill_length(
    given: int | None, config: ModelConfig, device: torch.device, comm: Communicator
) -> int:
    """Return the most prompt tokens of a step, the same on every rank; all ranks call it.

    Args:
        given: The setting, which all ranks share; ``None`` for auto.
        config: The model.
        device: Of this rank.
        comm: The ranks; with different GPUs they take what the smallest one would.
    """
    if given is not None:
        return given
    return comm.min_int(auto_prefill_length(config, device, comm.size))


def auto_prefill_length(config: ModelConfig, device: torch.device, tp_size: int) -> int:
    """Return how many tokens a step has on this device if nobody says.

    It depends on the model, the device and ``tp_size``, and on nothing that is measured.
    """
    if device.type != "cuda":
        return MIN_PREFILL_LENGTH
    count = torch.cuda.get_device_properties(device).multi_processor_count
    num_tokens = _TOKENS_PER_MULTIPROCESSOR * count
    flop = num_tokens * config.num_layers * layer_flop_per_token(config, tp_size)
    is_short = flop / FLOP_PER_S < _MAX_STEP_S
    return max(num_tokens, MIN_PREFILL_LENGTH) if is_short else MIN_PREFILL_LENGTH


def layer_flop_per_token(config: ModelConfig, tp_size: int) -> float:
    """Return what one layer's products take for a token on one rank, attention not counted.

    These are 2 for each parameter; of experts those of a token count.
    """
    return 2 * config.hidden_size * _product_width(config, tp_size)


def added_activation_bytes(
    config: ModelConfig, tp_size: int, dtype: torch.dtype, num_tokens: int
) -> int:
    """Return how much more memory a step of so many tokens takes than one of the least length.

    That is what one layer keeps at once: at most the factors and results of all its products. What
    the least length takes has to fit in what ``--memory-ratio`` leaves.
    """
    added = max(0, num_tokens - MIN_PREFILL_LENGTH)
    width = 3 * config.hidden_size + _product_width(config, tp_size)  # residual, normed, result
    return int(added * width * dtype.itemsize)


def _product_width(config: ModelConfig, tp_size: int) -> float:
    """Add up the sides of a layer's weights that are not ``hidden_size``, on one rank."""
    width = config.moe.top_k * config.moe.intermediate_size if config.moe else 0
    width = width or config.intermediate_size
    heads = 2 * (config.num_qo_heads + config.num_kv_heads) * config.head_dim
    return (heads + 3 * width) / tp_size
