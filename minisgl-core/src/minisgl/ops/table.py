"""From a chain of kernel sets to the one flat table that layers call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from torch import Tensor

from minisgl.errors import PluginError
from minisgl.ops import torch_ops
from minisgl.ops.contract import (
    OPS,
    PACKERS,
    ActAndMul,
    ApplyRope,
    GatedActivation,
    KernelSet,
    KernelTable,
    PackedLinear,
    PackGatedLinear,
    PackLinear,
    QKNormRopeStore,
    QKVInputs,
    RMSNorm,
    Rope,
    StoreKV,
)

COMPOSED = "composed"
"""Source of an op that no set offers and that the table builds from its other ops."""

# Without them the table is complete: the first two are composed, the others only save repeated
# work.
_OPTIONAL = ("qk_norm_rope_store", "pack_gated_linear", "rope_rows", "apply_rope")

NormHeads = Callable[[Tensor, tuple[Tensor, Tensor], int, float], Tensor]
"""See `minisgl.ops.torch_ops.norm_heads`."""

_Op = Callable[..., Any]  # ops have different signatures; the table's fields give each its own


def build_kernel_table(sets: Sequence[tuple[str, KernelSet]]) -> KernelTable:
    """Take each op from the first set of the chain that has it.

    Args:
        sets: Name and set, in the order of ``--kernels``.

    Returns:
        The table; ``sources`` says where each op came from. Where no set offers
        ``qk_norm_rope_store``, it is composed of the table's own ``rms_norm``, ``rope`` and
        ``store_kv``, whichever sets these come from. Likewise ``pack_gated_linear`` of
        ``pack_linear`` and the activations, unless the set that ``pack_linear`` is from has it.

    Raises:
        PluginError: A set offers an unknown op, or the chain lacks one.
    """
    ops, sources = _first_of_each(sets)
    missing = [name for name in (*OPS, *PACKERS) if name not in ops | dict.fromkeys(_OPTIONAL)]
    if missing:
        chain = ",".join(name for name, _ in sets)
        raise PluginError(
            f"--kernels {chain}: no set of the chain has {', '.join(missing)}; "
            "end the chain with 'torch', which has every op"
        )
    is_shared = sources["rope"] == sources.get("rope_rows") == sources.get("apply_rope")
    rope_rows = ops.pop("rope_rows", None)
    apply_rope = ops.pop("apply_rope", None)
    if "qk_norm_rope_store" not in ops:
        apply = apply_rope if is_shared else None
        norm_heads = torch_ops.norm_heads if ops["rms_norm"] is torch_ops.rms_norm else None
        ops["qk_norm_rope_store"] = compose_qk_norm_rope_store(
            ops["rms_norm"], ops["rope"], ops["store_kv"], apply, norm_heads
        )
        sources["qk_norm_rope_store"] = COMPOSED
    elif sources["qk_norm_rope_store"] != sources.get("rope_rows"):
        is_shared = False  # a fused op reads the cache itself, unless its own set says otherwise
    if sources.get("pack_gated_linear") != sources["pack_linear"]:
        activations = {name: ops[f"{name}_and_mul"] for name in get_args(GatedActivation)}
        ops["pack_gated_linear"] = compose_gated_linear(ops["pack_linear"], activations)
        sources["pack_gated_linear"] = COMPOSED
    return KernelTable(**ops, rope_rows=rope_rows if is_shared else None, sources=sources)


def compose_qk_norm_rope_store(
    rms_norm: RMSNorm,
    rope: Rope,
    store_kv: StoreKV,
    apply_rope: ApplyRope | None = None,
    norm_heads: NormHeads | None = None,
) -> QKNormRopeStore:
    """Build the fused op from its parts.

    Args:
        rms_norm: Norms the heads, where the model does.
        rope: Rotates q and k.
        store_kv: Writes k and v to the pool.
        apply_rope: Rotates in place of ``rope`` when ``inputs.rope_rows`` is set.
        norm_heads: Does the same as ``rms_norm``, on q and k in one tensor.
    """

    def qk_norm_rope_store(qkv: Tensor, inputs: QKVInputs) -> Tensor:
        num_q, num_kv = inputs.num_qo_heads, inputs.num_kv_heads
        num_qk = num_q + num_kv
        heads = qkv.view(qkv.shape[0], num_qk + num_kv, inputs.head_dim)
        rows = inputs.rope_rows if apply_rope is not None else None
        is_joint = inputs.q_norm is None or norm_heads is not None
        if apply_rope is not None and rows is not None and is_joint:
            # Norm and rotation act per head, so that q and k can stay one tensor.
            qk = heads[:, :num_qk]
            if norm_heads is not None and inputs.q_norm is not None and inputs.k_norm is not None:
                qk = norm_heads(qk, (inputs.q_norm, inputs.k_norm), num_q, inputs.eps)
            qk = apply_rope(qk, *rows)
            q, k = qk[:, :num_q], qk[:, num_q:]
        else:
            q, k = heads[:, :num_q], heads[:, num_q:num_qk]
            if inputs.q_norm is not None and inputs.k_norm is not None:
                q = rms_norm(q, inputs.q_norm, inputs.eps)
                k = rms_norm(k, inputs.k_norm, inputs.eps)
            if apply_rope is not None and rows is not None:
                q, k = apply_rope(q, *rows), apply_rope(k, *rows)
            else:
                q, k = rope(q, k, inputs.positions, inputs.cos_sin_cache)
        store_kv(k, heads[:, num_qk:], inputs.k_pool, inputs.v_pool, inputs.out_loc)
        return q  # [num_tokens, num_qo_heads, head_dim]

    return qk_norm_rope_store


class ActivatedLinear:
    """A product with a gated activation behind it.

    Attributes:
        is_original_needed: As the product says.
    """

    def __init__(self, product: PackedLinear, act_and_mul: ActAndMul) -> None:
        """Keep both."""
        self._product, self._act_and_mul = product, act_and_mul
        self.is_original_needed = product.is_original_needed

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[..., n]`` for a weight of ``2n`` outputs."""
        return self._act_and_mul(self._product(x))


def compose_gated_linear(
    pack_linear: PackLinear, activations: Mapping[GatedActivation, ActAndMul]
) -> PackGatedLinear:
    """Build the fused op from a product and the activations by their names."""

    def pack_gated_linear(
        weight: Tensor, bias: Tensor | None, activation: GatedActivation
    ) -> PackedLinear:
        return ActivatedLinear(pack_linear(weight, bias), activations[activation])

    return pack_gated_linear


def _first_of_each(
    sets: Sequence[tuple[str, KernelSet]],
) -> tuple[dict[str, _Op], dict[str, str]]:
    """Return op by name and set by op name, the first set of the chain winning."""
    ops: dict[str, _Op] = {}
    sources: dict[str, str] = {}
    for set_name, kernels in sets:
        offered: Mapping[str, _Op] = kernels.ops()
        for name, op in offered.items():
            if name not in OPS and name not in PACKERS:
                known = ", ".join((*OPS, *PACKERS))
                raise PluginError(
                    f"--kernels {set_name}: the set offers an unknown op {name!r}; known: {known}"
                )
            if name not in ops:
                ops[name], sources[name] = op, set_name
    return ops, sources
