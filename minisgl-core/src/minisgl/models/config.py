"""One normaliser for config.json, whichever transformers version wrote it.

It reads the JSON itself: a library that also interprets it would change field names and defaults
from version to version. What we cannot run is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl.errors import ModelError
from minisgl.layers.rotary import RopeConfig
from minisgl.models.families import FAMILIES, GENERIC, Family
from minisgl.models.fields import Fields
from minisgl.models.rope_fields import context_length, normalize_rope

Activation = Literal["silu", "gelu", "gelu_tanh"]

_ACTIVATIONS: tuple[tuple[Activation, tuple[str, ...]], ...] = (
    ("silu", ("silu", "swish")),
    ("gelu", ("gelu",)),
    ("gelu_tanh", ("gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")),
)
_QUANTIZED = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The experts of a sparse model.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        intermediate_size: Width of one expert, over all ranks.
        is_renormalized: Whether the ``top_k`` routing weights are scaled to sum to 1.
        is_sparse: One flag per layer; False for a layer with a dense MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    is_renormalized: bool
    is_sparse: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a checkpoint is, in one spelling. Sizes are those of the whole model, not of a rank.

    Attributes:
        architecture: Hugging Face class name; the name of the model backend.
        vocab_size: Tokens, the width of embedding and head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of a dense MLP.
        num_layers: Decoder layers.
        num_qo_heads: Query heads.
        num_kv_heads: KV heads; divides ``num_qo_heads``.
        head_dim: Of each head; need not be ``hidden_size / num_qo_heads``.
        activation: Of the gated MLP.
        rms_norm_eps: Of every norm.
        rope: The rotation.
        context_len: Tokens that the checkpoint is made for, rope scaling included.
        has_tied_head: Whether the head is the embedding.
        has_qkv_bias: Whether q, k and v have biases.
        has_o_bias: Whether the attention output projection has one.
        has_mlp_bias: Whether the MLP projections have one.
        has_qk_norm: Whether the heads of q and k are normed.
        windows: Sliding window of each layer in tokens, the query's own included; ``None`` for
            full attention.
        moe: The experts, or ``None`` for a dense model.
        eos_token_ids: End-of-sequence ids that config.json names.
        raw: The JSON, for options of architectures that other distributions bring.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    activation: Activation
    rms_norm_eps: float
    rope: RopeConfig
    context_len: int
    has_tied_head: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]
    moe: MoEShape | None = None
    eos_token_ids: tuple[int, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)  # free-form JSON


def normalize_config(
    config: Mapping[str, Any], architectures: Collection[str] = tuple(FAMILIES)
) -> ModelConfig:
    """Read a config.json.

    Architectures of other distributions are read by the fields that are most common: those of
    Llama, ``attention_bias``, ``mlp_bias`` and ``use_qk_norm``, and where ``use_sliding_window`` is
    set ``sliding_window`` for the layers of ``layer_types``. `BackendSpec.adapt_config` brings
    other spellings and defaults into this form.

    Args:
        config: Its content.
        architectures: Class names that can be run: those of the core, or of all installed
            distributions.

    Raises:
        ModelError: The architecture is not among them, the weights are quantised, a required
            field is missing, or a field has a value that we cannot run; the message names it.
    """
    architecture = architecture_of(config, architectures)
    family = FAMILIES.get(architecture, GENERIC)
    _refuse_quantized(config)
    fields = Fields(config, family.defaults)
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    num_qo_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_qo_heads)
    if num_qo_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_qo_heads} must be a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    head_dim = fields.integer("head_dim", max(1, hidden_size // num_qo_heads))
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} must be even for a rotary embedding")
    rope = normalize_rope(fields, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=_activation(fields, family),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        context_len=context_length(rope),
        has_tied_head=fields.boolean("tie_word_embeddings"),
        has_qkv_bias=_decide(family.qkv_bias, fields, "attention_bias"),
        has_o_bias=_decide(family.o_bias, fields, "attention_bias"),
        has_mlp_bias=_decide(family.mlp_bias, fields, "mlp_bias"),
        has_qk_norm=_decide(family.has_qk_norm, fields, "use_qk_norm"),
        windows=_windows(fields, family, num_layers),
        moe=_moe(fields, family, num_layers),
        eos_token_ids=_eos_token_ids(config),
        raw=config,
    )


def architecture_of(config: Mapping[str, Any], known: Collection[str]) -> str:
    """Return the class name, from ``architectures`` or else from ``model_type``.

    Raises:
        ModelError: It is not among ``known``.
    """
    named = config.get("architectures")
    if named:
        architecture = str(named[0])
    else:
        model_type = config.get("model_type")
        matches = [name for name, family in FAMILIES.items() if family.model_type == model_type]
        architecture = matches[0] if matches else f"model_type {model_type!r}"
    if architecture not in known:
        raise ModelError(
            f"config.json: architecture {architecture} is not supported; "
            f"supported: {', '.join(sorted(known))}"
        )
    return architecture


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    for key in _QUANTIZED:
        value = config.get(key)
        if value:
            method = value.get("quant_method", "unnamed") if isinstance(value, dict) else value
            raise ModelError(
                f"config.json: {key} asks for quantised weights ({method}), which cannot be run; "
                "use the checkpoint in float32, float16 or bfloat16"
            )


def _activation(fields: Fields, family: Family) -> Activation:
    name = str(fields.get("hidden_act", "silu"))
    for activation, spellings in _ACTIVATIONS:
        if name in spellings:
            if family.moe and activation != "silu":
                raise ModelError(f"config.json: hidden_act {name!r}: experts must use silu")
            return activation
    known = ", ".join(spelling for _, spellings in _ACTIVATIONS for spelling in spellings)
    raise ModelError(f"config.json: hidden_act {name!r}: must be one of {known}")


def _decide(fixed: bool | None, fields: Fields, key: str) -> bool:
    return fields.boolean(key) if fixed is None else fixed


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, as the family's Hugging Face class would use it."""
    is_on = family.window == "always" or (
        family.window == "flagged" and fields.boolean("use_sliding_window")
    )
    window = fields.optional_integer("sliding_window") if is_on else None
    if window is None:
        return (None,) * num_layers
    first = 0
    if family.window == "flagged" and family.window_start:
        layer_types = fields.get("layer_types")
        if layer_types is not None:
            return _windows_by_type(layer_types, window, num_layers)
        first = fields.integer("max_window_layers", 0, minimum=0)
    return tuple(window if i >= first else None for i in range(num_layers))


def _windows_by_type(
    layer_types: Any,  # of any JSON type until checked
    window: int,
    num_layers: int,
) -> tuple[int | None, ...]:
    """Return each layer's window by ``layer_types``."""
    kinds = {"full_attention": None, "sliding_attention": window}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelError(f"config.json: layer_types must name all {num_layers} layers")
    for kind in layer_types:
        if kind not in kinds:
            raise ModelError(
                f"config.json: layer_types holds {kind!r}; supported: {', '.join(kinds)}"
            )
    return tuple(kinds[kind] for kind in layer_types)


def _moe(fields: Fields, family: Family, num_layers: int) -> MoEShape | None:
    if family.moe is None:
        return None
    if family.moe == "mixtral":
        num_experts = fields.integer("num_local_experts")
        intermediate_size = fields.integer("intermediate_size")
        is_sparse = (True,) * num_layers
        is_renormalized = True
    else:
        # transformers 5 can also write the name that it maps this one to.
        num_experts = fields.integer(
            "num_local_experts" if "num_local_experts" in fields else "num_experts", minimum=0
        )
        intermediate_size = fields.integer("moe_intermediate_size")
        step = fields.integer("decoder_sparse_step", 1)
        dense = fields.get("mlp_only_layers") or ()
        is_sparse = tuple(
            i not in dense and num_experts > 0 and (i + 1) % step == 0 for i in range(num_layers)
        )
        is_renormalized = fields.boolean("norm_topk_prob")
    top_k = fields.integer("num_experts_per_tok")
    if not any(is_sparse):
        return None
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok {top_k} must not exceed the {num_experts} experts"
        )
    return MoEShape(num_experts, top_k, intermediate_size, is_renormalized, is_sparse)


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
