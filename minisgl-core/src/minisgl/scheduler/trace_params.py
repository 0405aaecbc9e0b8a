"""Sampling parameters as a trace has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from minisgl.errors import RequestError
from minisgl.sampling_params import SamplingParams
from minisgl.shown import shown

_SECRET_PARAMS = ("stop", "stop_token_ids", "logit_bias")
"""Sampling parameters that hold text or token ids."""


def plain_params(params: SamplingParams, *, has_secrets: bool) -> dict[str, Any]:  # Any: JSON
    """Return the parameters that differ from their defaults, as JSON has them."""
    plain: dict[str, Any] = {}  # Any: as above
    defaults = SamplingParams()
    for each in fields(params):
        value = getattr(params, each.name)
        if value == getattr(defaults, each.name) or (
            each.name in _SECRET_PARAMS and not has_secrets
        ):
            continue
        plain[each.name] = list(value.items()) if each.name == "logit_bias" else value
    return plain


def made_params(plain: Mapping[str, Any]) -> SamplingParams:  # Any: JSON
    """Make the parameters that `plain_params` wrote down.

    Raises:
        RequestError: A name is unknown, or a value is not allowed.
    """
    known = [each.name for each in fields(SamplingParams)]
    for name in plain:
        if name not in known:
            raise RequestError(f"{name}: unknown parameter; known: {', '.join(known)}")
    given = dict(plain)
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return SamplingParams(**given)


def _bias(pairs: object) -> dict[int, float]:
    """Read the list of pairs that stands for a mapping: keys of JSON would be text."""
    bias: dict[int, float] = {}
    for pair in pairs if isinstance(pairs, list | tuple) else [pairs]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], int):
            raise RequestError(f"logit_bias {shown(pairs)}: must be a list of [token id, number]")
        bias[pair[0]] = pair[1]
    return bias
