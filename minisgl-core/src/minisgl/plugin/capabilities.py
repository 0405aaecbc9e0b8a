"""Reasoning about what attention backends can do: refusals in words, and a page size for two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm

from minisgl.plugin.spec import Capabilities, Phase, ProbeContext


def missing_capability(
    capabilities: Capabilities, phases: Iterable[Phase], context: ProbeContext
) -> str:
    """Say why a backend cannot serve these phases here, or return an empty text."""
    return next(_missing(capabilities, tuple(phases), context), "")


def admits(capabilities: Capabilities, page_size: int) -> bool:
    """Return whether a backend works with pages of this many tokens."""
    is_listed = capabilities.page_sizes is None or page_size in capabilities.page_sizes
    return is_listed and page_size % capabilities.page_multiple == 0


def page_sizes_of(capabilities: Capabilities) -> str:
    """Say which page sizes a backend takes."""
    multiple = capabilities.page_multiple
    if capabilities.page_sizes is None:
        return "any page size" if multiple == 1 else f"a page size that is a multiple of {multiple}"
    sizes = [size for size in sorted(capabilities.page_sizes) if admits(capabilities, size)]
    return f"a page size of {' or '.join(map(str, sizes))}"


def shared_page_size(backends: Iterable[Capabilities], at_least: int = 1) -> int | None:
    """Find a page size that all backends take.

    Args:
        backends: What each can do.
        at_least: The size that is wanted when it is left to us.

    Returns:
        The smallest shared size of at least ``at_least`` tokens, else the largest shared one, or
        ``None``.
    """
    known = list(backends)
    listed = [set(each.page_sizes) for each in known if each.page_sizes is not None]
    if listed:
        shared = sorted(s for s in set.intersection(*listed) if all(admits(b, s) for b in known))
        fitting = [size for size in shared if size >= at_least]
        return fitting[0] if fitting else (shared[-1] if shared else None)
    step = lcm(*(each.page_multiple for each in known))
    return -(-at_least // step) * step


def _missing(
    capabilities: Capabilities, phases: tuple[Phase, ...], context: ProbeContext
) -> Iterator[str]:
    for phase in phases:
        if phase not in capabilities.phases:
            yield f"does not serve {phase}"
    if context.dtype not in capabilities.dtypes:
        yield f"wants dtype {' or '.join(capabilities.dtypes)}, not {context.dtype}"
    heads = capabilities.head_dims
    if context.head_dim is not None and heads is not None and context.head_dim not in heads:
        wanted = " or ".join(map(str, heads))
        yield f"wants a head dimension of {wanted}, and the model has {context.head_dim}"
    if context.page_size is not None and not admits(capabilities, context.page_size):
        yield f"wants {page_sizes_of(capabilities)}, not {context.page_size}"
    if context.has_sliding_window and not capabilities.has_sliding_window:
        yield "has no sliding window, which the model needs"
    if "decode" in phases and context.needs_graph_capture and not capabilities.has_graph_capture:
        yield "cannot be captured in CUDA graphs; ask for it with --cuda-graph-max-bs 0"
