"""The tokenizer that a GGUF file's metadata describes, as a Hugging Face fast tokenizer.

A GGUF file holds vocabulary, merges and token kinds, but only names how text is split before the
merges apply (``tokenizer.ggml.pre``). The splits below are those of the original tokenizers that
llama.cpp knows under these names.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from minisgl.errors import ModelError
from minisgl.weights.gguf_file import GGUFFile, MetaValue

logger = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token kinds of the specification
_SPACE = "\u2581"  # how sentencepiece writes a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _WORDS % "{1,3}"
_QWEN2_SPLIT = _WORDS % ""
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level tokenizer cuts text into words.

    Attributes:
        pattern: Regular expression of one word; ``None`` is GPT-2's.
        has_single_digits: Every digit is cut off first.
        has_nfc: Text is put into Unicode's composed form first.
        ignores_merges: A whole word that is a token is taken as it is.
        adds_bos: What holds where the file does not say.
    """

    pattern: str | None = None
    has_single_digits: bool = False
    has_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2 = _Split()
_DIGITS = _Split(has_single_digits=True)
_LLAMA3 = _Split(_LLAMA3_SPLIT, ignores_merges=True, adds_bos=True)
_LLAMA3_MERGED = _Split(_LLAMA3_SPLIT)
_QWEN2 = _Split(_QWEN2_SPLIT, has_nfc=True)
_TEKKEN = _Split(_TEKKEN_SPLIT, ignores_merges=True, adds_bos=True)

_SPLITS = {
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "jina-es": _GPT2,
    "jina-de": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}


def build_gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Build the tokenizer.

    Returns:
        A fast tokenizer whose ids are those of the file, with its chat template if it has one.

    Raises:
        ModelError: The file has no vocabulary, or one of a kind that is not known.
    """
    meta = _TokenizerKeys(file)
    kind = meta.get("model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(meta)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(meta), True
    else:
        raise ModelError(f"{file.path}: tokenizer.ggml.model {kind!r}; known: gpt2, llama")
    _add_special_tokens(tokenizer, meta)
    _set_post_processor(tokenizer, meta, adds_bos)
    special = {
        name: token
        for name, key in (
            ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if (token := meta.token(key)) is not None
    }  # fmt: skip
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    wrapped.chat_template = _chat_template(file)
    return wrapped


class _TokenizerKeys:
    """Looks up ``tokenizer.ggml`` keys."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._metadata = file.metadata
        self.tokens: list[str] = self.get("tokens") or []
        if not self.tokens:
            raise ModelError(f"{file.path}: holds no tokenizer (no tokenizer.ggml.tokens)")
        self.kinds: list[int] = self.get("token_type") or [1] * len(self.tokens)

    def get(self, key: str, default: MetaValue = None) -> MetaValue:
        """Return a value."""
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def token(self, key: str) -> str | None:
        """Return the token that ``KEY_token_id`` names."""
        token_id = self.get(f"{key}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(
                f"{self.path}: tokenizer.ggml.{key}_token_id {token_id}: the vocabulary has "
                f"{len(self.tokens)} tokens"
            )
        return self.tokens[token_id]


def _byte_level(meta: _TokenizerKeys) -> tuple[Tokenizer, bool]:
    """Build byte-level BPE, and say whether it adds BOS unless the file says otherwise."""
    split = _find_split(meta)
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("merges", [])]
    vocab = {token: i for i, token in enumerate(meta.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.ignores_merges))
    if split.has_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    has_own_pattern = split.pattern is not None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not has_own_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _find_split(meta: _TokenizerKeys) -> _Split:
    """Look up how text is cut; a wrong guess would quietly hurt every answer."""
    name = meta.get("pre")
    if name in (None, "default"):
        logger.warning(
            "%s: names no pre-tokenizer (tokenizer.ggml.pre), GPT-2's is used; convert the model "
            "again if its answers are poor",
            meta.path,
        )
        return _GPT2
    if name not in _SPLITS:
        raise ModelError(
            f"{meta.path}: tokenizer.ggml.pre {name!r} is not known; known: "
            f"{', '.join(sorted(_SPLITS))}"
        )
    return _SPLITS[name]


def _sentencepiece(meta: _TokenizerKeys) -> Tokenizer:
    """Build sentencepiece's BPE: spaces as a visible character, unknown characters as bytes."""
    tokens = meta.tokens
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(vocab, meta),
            unk_token=meta.token("unknown") or _first_of_kind(meta, _UNKNOWN),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = meta.get("add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoding: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if has_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], meta: _TokenizerKeys) -> list[tuple[str, str]]:
    """Recover merges: every way to put a token together, the best-scored token first.

    Sentencepiece merges the neighbours whose union scores best; ranking the pairs by the score of
    their union makes BPE do the same.
    """
    scores = meta.get("scores")
    if scores is None:
        raise ModelError(f"{meta.path}: holds no tokenizer.ggml.scores, which its kind needs")
    special = (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ranked = sorted(
        (i for i, kind in enumerate(meta.kinds) if kind not in special),
        key=lambda i: -scores[i],
    )
    merges = []
    for i in ranked:
        token = meta.tokens[i]
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def _first_of_kind(meta: _TokenizerKeys, kind: int) -> str | None:
    return next((t for t, k in zip(meta.tokens, meta.kinds, strict=False) if k == kind), None)


def _add_special_tokens(tokenizer: Tokenizer, meta: _TokenizerKeys) -> None:
    """Make control and user-defined tokens match as wholes, before any splitting."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(meta.tokens, meta.kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _set_post_processor(tokenizer: Tokenizer, meta: _TokenizerKeys, adds_bos: bool) -> None:
    """Add BOS and EOS where the file asks for them."""
    bos = meta.token("bos") if meta.get("add_bos_token", adds_bos) else None
    eos = meta.token("eos") if meta.get("add_eos_token", False) else None
    single = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
    special = [(token, meta.tokens.index(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=special
    )


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the chat template, or all of them by name where the file has several."""
    prefix = "tokenizer.chat_template"
    default = file.metadata.get(prefix)
    named = {
        key.removeprefix(f"{prefix}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{prefix}.")
    }
    if named and default is not None:
        return {"default": default, **named}
    return default if isinstance(default, str) else None
