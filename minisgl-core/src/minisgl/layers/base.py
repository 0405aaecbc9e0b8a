"""Ops that hold parameters, and where each tensor of a checkpoint goes.

A model is a tree of `BaseOP`. Its leaves say which checkpoint tensors they want and into which
part of their own (fused, sharded, padded) parameters each goes; a loader streams any source past
that flat table, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The place of one checkpoint tensor, or of a part of it.

    The table may hold the same name more than once: a tensor that the checkpoint has fused (or
    that is tied) then goes to several places.

    Attributes:
        dest: View of a parameter that takes the selected part; its dtype and device are the
            model's, the loader converts. ``None`` when this rank keeps nothing of the tensor: it
            is known, and skipped.
        shape: Shape that the whole tensor must have in the checkpoint; empty when ``dest`` is
            ``None`` and any shape will do.
        index: Which part of it this rank keeps; has the shape of ``dest``.
        is_optional: The checkpoint may leave it out (the head of a tied model).
        replaces: Full names of targets that need not be there when this tensor is (experts that
            the checkpoint stores as one tensor instead of one by one). A checkpoint that has both
            is refused. Implies that this tensor itself is optional.
    """

    dest: torch.Tensor | None
    shape: tuple[int, ...] = ()
    index: tuple[slice, ...] = (slice(None),)
    is_optional: bool = False
    replaces: tuple[str, ...] = ()


class BaseOP:
    """A node of the model tree; children are attributes that are ops, or lists of ops."""

    def children(self) -> Iterator[tuple[str, BaseOP]]:
        """Yield the child ops with their names, in order of definition."""
        for name, value in vars(self).items():
            if isinstance(value, BaseOP):
                yield name, value
            elif isinstance(value, list) and value and isinstance(value[0], BaseOP):
                for i, op in enumerate(value):
                    yield f"{name}.{i}", op

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the checkpoint tensors of this op itself, named relative to it.

        A name that starts with ``../`` is relative to the parent (a fused q/k/v product is one op
        for three checkpoint modules); names in ``replaces`` are relative in the same way.
        """
        return iter(())

    def load_targets(self, prefix: str = "") -> Iterator[tuple[str, LoadTarget]]:
        """Yield the checkpoint tensors of the whole tree by their full names."""
        for name, target in self.own_targets():
            if target.replaces:
                names = tuple(_join(prefix, replaced) for replaced in target.replaces)
                target = replace(target, replaces=names)
            yield _join(prefix, name), target
        for name, op in self.children():
            yield from op.load_targets(_join(prefix, name))

    def finalize(self) -> None:
        """Get ready to run after all parameters are loaded: pack weights, free originals."""
        for _, op in self.children():
            op.finalize()


def _join(prefix: str, name: str) -> str:
    """Append a relative name to a dotted prefix."""
    while name.startswith("../"):
        name = name[3:]
        prefix = prefix.rpartition(".")[0]
    return f"{prefix}.{name}" if prefix else name
