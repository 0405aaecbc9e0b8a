"""Streams a checkpoint past a model's load targets, one tensor at a time.

Everything that can be known without reading data is checked first (missing, unexpected, wrongly
shaped tensors), so a checkpoint that does not fit fails at once. Then each tensor is read, of it
only what this rank keeps, converted and copied; host memory never holds more than the model and
one tensor. The work is linear in the number of tensors.
"""

from __future__ import annotations

import logging
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping

import torch
from tqdm import tqdm

from minisgl.errors import ModelError
from minisgl.layers.base import LoadTarget
from minisgl.weights.contract import WeightReader

logger = logging.getLogger(__name__)

Targets = Mapping[str, LoadTarget] | Iterable[tuple[str, LoadTarget]]
"""What ``model.load_targets()`` yields; a name may come several times."""

_HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)attn\.(bias|masked_bias)$"
)
"""Buffers of old checkpoints that are computed, not learned."""

_HEAD = "lm_head.weight"
_MAX_LISTED = 5

_DUMMY_PERIOD = 65537  # prime, so that rows of any usual width are different shifts
_DUMMY_STD = 0.02


def load_weights(
    targets: Targets,
    reader: WeightReader,
    progress: bool = False,
    on_tensor: Callable[[], None] | None = None,
) -> None:
    """Fill all targets from a checkpoint.

    Args:
        targets: Pairs of checkpoint name and target, as ``model.load_targets()`` yields them.
        reader: The opened checkpoint; not closed.
        progress: Show a bar on stderr, if that is a terminal.
        on_tensor: Called before each tensor; what it raises ends the loading.

    Raises:
        ModelError: A tensor is missing, unexpected, stored twice or of the wrong shape, or a file
            is damaged; the message names file and tensor. Targets may be partly filled then.
    """
    table = _group(targets)
    plan = _match(table, reader)
    is_shown = progress and sys.stderr.isatty()
    for name in tqdm(plan, desc="loading weights", unit="tensor", disable=not is_shown):
        if on_tensor is not None:
            on_tensor()
        for target in table[name]:
            if target.dest is not None:
                _copy(name, target, reader)


def init_dummy_weights(
    targets: Targets, seed: int = 0, on_tensor: Callable[[], None] | None = None
) -> None:
    """Fill all targets with small random numbers, without a checkpoint.

    Each number depends on the seed, the tensor's name and its place in the whole tensor, so that
    the slices of all ranks together are the same model at every tensor-parallel size. Matrices
    have zero mean and a standard deviation of 0.02, vectors named ``weight`` (norms) a mean of 1.
    torch's global random state is neither used nor changed.

    Args:
        targets: As in `load_weights`.
        seed: Any integer.
        on_tensor: As in `load_weights`.
    """
    for name, group in _group(targets).items():
        if on_tensor is not None:
            on_tensor()
        if _is_alternative(group):
            continue
        for target in group:
            if target.dest is not None:
                _fill_dummy(name, target, seed)


def _group(targets: Targets) -> dict[str, list[LoadTarget]]:
    """Collect the targets of each name."""
    pairs = targets.items() if isinstance(targets, Mapping) else targets
    table: dict[str, list[LoadTarget]] = {}
    for name, target in pairs:
        table.setdefault(name, []).append(target)
    return table


def _match(table: Mapping[str, list[LoadTarget]], reader: WeightReader) -> list[str]:
    """Check names and shapes, and return the names to read in storage order."""
    plan: list[str] = []
    unexpected: list[str] = []
    seen: set[str] = set()
    for name in reader.names():
        if name in seen:
            raise ModelError(f"{reader.where(name)}: tensor {name} is stored twice")
        seen.add(name)
        if name in table:
            plan.append(name)
        elif name == _HEAD:
            logger.debug("%s: %s ignored, the embedding is the head", reader.where(name), name)
        elif not _HARMLESS.search(name):
            unexpected.append(name)
    if unexpected:
        raise ModelError(
            f"{reader.where(unexpected[0])}: {len(unexpected)} tensors that the model does not "
            f"have: {_listed(unexpected)}"
        )
    _check_complete(table, seen, reader)
    for name in plan:
        _check_shape(name, table[name], reader)
    return plan


def _check_complete(
    table: Mapping[str, list[LoadTarget]], seen: set[str], reader: WeightReader
) -> None:
    """Refuse a checkpoint that lacks tensors, or has some in two forms."""
    replaced: set[str] = set()
    for name, group in table.items():
        if name in seen and _is_alternative(group):
            names = {other for target in group for other in target.replaces}
            both = sorted(names & seen)
            if both:
                raise ModelError(
                    f"{reader.where(name)}: has tensor {name} and also {both[0]}, which it replaces"
                )
            replaced |= names
    missing = [
        name
        for name, group in table.items()
        if name not in seen and name not in replaced and not _is_optional(group)
    ]
    if missing:
        hint = ""
        if _HEAD in missing:
            hint = "; if the head is the embedding, config.json must say tie_word_embeddings: true"
        raise ModelError(
            f"{reader.where()}: {len(missing)} tensors are missing: {_listed(missing)}{hint}"
        )


def _is_alternative(group: list[LoadTarget]) -> bool:
    """Whether the tensor is another form of others."""
    return any(target.replaces for target in group)


def _is_optional(group: list[LoadTarget]) -> bool:
    return all(target.is_optional or target.replaces for target in group)


def _check_shape(name: str, group: list[LoadTarget], reader: WeightReader) -> None:
    shape = tuple(reader.shape(name))
    for target in group:
        is_free = target.dest is None and not target.shape
        if not is_free and shape != tuple(target.shape):
            raise ModelError(
                f"{reader.where(name)}: tensor {name} has shape {list(shape)}, the configuration "
                f"asks for {list(target.shape)}"
            )


def _copy(name: str, target: LoadTarget, reader: WeightReader) -> None:
    """Read the wanted part of a tensor into its place."""
    assert target.dest is not None, "a target without a destination keeps nothing"
    index = _full_index(target)
    part = reader.read(name, index)
    if part.shape != target.dest.shape:
        raise ModelError(
            f"{reader.where(name)}: tensor {name}: the selected part {list(part.shape)} does not "
            f"fit {list(target.dest.shape)}"
        )
    target.dest.copy_(part)


def _full_index(target: LoadTarget) -> tuple[slice, ...]:
    """Return one slice for each dimension."""
    missing = len(target.shape) - len(target.index)
    return target.index + (slice(None),) * missing


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _fill_dummy(name: str, target: LoadTarget, seed: int) -> None:
    """Fill one target with its part of a long repeating row of random numbers.

    Drawing a number for each of billions of weights would take minutes; a matrix whose rows are
    shifts of one random row has full rank too.
    """
    assert target.dest is not None, "a target without a destination keeps nothing"
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.empty(_DUMMY_PERIOD).normal_(0.0, _DUMMY_STD, generator=generator)
    if len(target.shape) == 1 and name.endswith("weight"):
        noise += 1.0
    slices = [s.indices(n) for s, n in zip(_full_index(target), target.shape, strict=True)]
    row = torch.zeros(1, dtype=torch.int64)  # number of each kept row in the whole tensor
    for kept, size in zip(slices[:-1], target.shape[:-1], strict=True):
        row = (row[:, None] * size + torch.arange(*kept)).flatten()
    start, stop, step = slices[-1]
    num_repeats = 2 + stop // _DUMMY_PERIOD
    windows = noise.repeat(num_repeats)[start:].unfold(0, max(stop - start, 0), 1)
    part = windows[row * target.shape[-1] % _DUMMY_PERIOD, ::step]
    target.dest.copy_(part.reshape(target.dest.shape))
