"""The rope fields of a config.json, in every spelling that transformers has written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.errors import ModelError
from minisgl.layers.rotary import ROPE_TYPES, RopeConfig
from minisgl.models.fields import Fields

_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
_LISTS = ("short_factor", "long_factor")
_REQUIRED = (
    ("linear", ("factor",)),
    ("dynamic", ("factor",)),
    ("llama3", ("factor", "low_freq_factor", "high_freq_factor")),
    ("longrope", ("short_factor", "long_factor")),
)
_HAS_ORIGINAL = ("llama3", "yarn", "longrope")


def normalize_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read ``rope_theta``, ``rope_scaling`` and ``rope_parameters``.

    ``rope_scaling`` (transformers 4) wins where it says something; type and theta may be inside
    or beside it, the type spelled ``rope_type`` or ``type``; null, ``{}`` and ``default`` are the
    plain rotation.

    Raises:
        ModelError: The kind is unknown, a field of it is missing or not a number, or the rotation
            is partial or differs between layers.
    """
    scaling, parameters = _mapping(fields, "rope_scaling"), _mapping(fields, "rope_parameters")
    rope = scaling or parameters
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope type {rope_type!r} is not supported; "
            f"supported: {', '.join(ROPE_TYPES)}"
        )
    for key in ("partial_rotary_factor", "mrope_section"):
        value = rope.get(key, fields.get(key))
        if value not in (None, 1, 1.0):
            raise ModelError(f"config.json: {key} {value!r} is not supported")
    theta = rope.get("rope_theta") or parameters.get("rope_theta")
    max_positions = fields.integer("max_position_embeddings")
    original = fields.get("original_max_position_embeddings")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta) if theta else fields.number("rope_theta", 10000.0),
        head_dim=head_dim,
        max_positions=max_positions,
        scaling=_scaling(rope, rope_type, original or max_positions, bool(original), head_dim),
    )


def context_length(rope: RopeConfig) -> int:
    """Return the tokens that a scaled model is made for.

    ``max_position_embeddings`` is the length before scaling for ``linear`` and ``dynamic``, and
    the one after it for ``llama3`` and ``longrope``. With ``yarn`` checkpoints disagree, so the
    original length times the factor counts.
    """
    factor = rope.scaling.get("factor")
    if factor is None:
        return rope.max_positions
    if rope.rope_type in ("linear", "dynamic"):
        return int(rope.max_positions * factor)
    if rope.rope_type == "yarn":
        return int(rope.scaling["original_max_position_embeddings"] * factor)
    return rope.max_positions


def _mapping(fields: Fields, key: str) -> Mapping[str, Any]:
    """Return a JSON object, empty where it is absent or null."""
    value = fields.get(key, {})
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key} {value!r}: must be an object")
    if any(isinstance(inner, Mapping) for inner in value.values()):
        raise ModelError(f"config.json: {key} differs between layers, which is not supported")
    return value


def _scaling(
    rope: Mapping[str, Any], rope_type: str, original: int, is_outside: bool, head_dim: int
) -> dict[str, Any]:
    """Pick the fields of the kind and check them; other fields mean nothing and are dropped."""
    if rope_type == "default":
        return {}
    picked = {key: rope[key] for key in (*_NUMBERS, *_LISTS) if rope.get(key) is not None}
    if "truncate" in rope:
        picked["truncate"] = bool(rope["truncate"])
    if rope_type in _HAS_ORIGINAL and (
        is_outside or "original_max_position_embeddings" not in picked
    ):
        # The field beside the rope parameters has priority, as in transformers.
        picked["original_max_position_embeddings"] = original
    if rope_type == "yarn":
        picked.setdefault("factor", None)  # derived from the two lengths
    for key in dict(_REQUIRED).get(rope_type, ()):
        if key not in picked:
            raise ModelError(f"config.json: rope type {rope_type!r} needs {key}")
    for key, value in picked.items():
        _check(key, value, head_dim)
    return picked


def _check(key: str, value: Any, head_dim: int) -> None:
    """Refuse what is not a number, or a list of one number per frequency."""
    if key in _LISTS:
        is_good = isinstance(value, list) and len(value) == head_dim // 2
        if not is_good or not all(_is_number(item) for item in value):
            raise ModelError(f"config.json: {key} must hold head_dim / 2 = {head_dim // 2} numbers")
    elif key in _NUMBERS and value is not None and not _is_number(value):
        raise ModelError(f"config.json: {key} {value!r}: must be a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
