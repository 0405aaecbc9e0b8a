"""How one request wants its tokens chosen, validated where it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from minisgl.errors import RequestError, SettingsError
from minisgl.shown import shown

GREEDY_TEMPERATURE = 1e-5
"""Below this the distribution is a point in float32, so the request is treated as greedy."""

MAX_LOGPROBS = 20
_T = TypeVar("_T")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; immutable, so one object can serve many requests.

    Attributes:
        max_tokens: Tokens to generate at most, at least 1; ``None`` means up to the context limit.
            0 goes with ``prompt_logprobs``, for whoever wants nothing else.
        min_tokens: Tokens among which no end-of-sequence token and no stop token id is sampled, and
            whose text is not searched for stop strings: one must end in text of later tokens. It
            may begin before, and the text is then cut there. A character is text of the token
            that completes it.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: Drop tokens less likely than this share of the likeliest one, in [0, 1].
        seed: With a seed the result depends on prompt, parameters and seed alone, whoever shares
            the batch; without one it differs from run to run.
        repetition_penalty: Over 1 makes tokens of prompt and output less likely; in [0.01, 100],
            which no logit leaves the range of float32 by.
        presence_penalty: Taken off the logit of each token in the output, in [-2, 2].
        frequency_penalty: The same, once per occurrence.
        logit_bias: Added to the logits of these token ids; values in [-100, 100].
        logprobs: ``None``, or how many of the likeliest tokens to report beside the sampled one.
        prompt_logprobs: The same for each prompt token but the first, which has nothing before it.
            The prompt is then computed in full, whatever the prefix cache has of it.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Token ids that end the request, all of the model's vocabulary.
        ignore_eos: Go on after an end-of-sequence token.
        skip_special_tokens: Leave special tokens out of the text.
        n: Completions of the same prompt.
    """

    max_tokens: int | None = 1024
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and refuse values out of range.

        Raises:
            RequestError: A field has a value that is not allowed; the message names both.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias {shown(self.logit_bias)}: must be a mapping of token ids to numbers"
            )
        self._check_counts()
        self._check_ranges()
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} {shown(value)}: must be true or false")

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> SamplingParams:  # Any: of each field
        """Make parameters of what was given as flags, by the names of fields.

        Raises:
            SettingsError: A value is not allowed; the message names the flag.
        """
        try:
            return cls(**values)
        except RequestError as error:  # it begins with the name of the field, which the flag has
            name, _, rest = str(error).replace(" max_tokens ", " --max-tokens ").partition(" ")
            raise SettingsError(f"--{name.replace('_', '-')} {rest}") from error

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that a model does not have.

        Raises:
            RequestError: `logit_bias` or `stop_token_ids` has one.
        """
        for i, token_id in enumerate(self.stop_token_ids):
            if token_id >= vocab_size:
                raise RequestError(
                    f"stop_token_ids[{i}] {token_id}: must be from 0 to {vocab_size - 1}"
                )
        for token_id in self.logit_bias:
            if token_id >= vocab_size:
                raise RequestError(
                    f"logit_bias of token id {token_id}: must be from 0 to {vocab_size - 1}"
                )

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            lowest = 1 if self.prompt_logprobs is None else 0
            _check_int("max_tokens", self.max_tokens, lowest, _INT32_MAX)
        _check_int("min_tokens", self.min_tokens, 0, _INT32_MAX)
        _check_int("n", self.n, 1, 1024)
        if self.top_k != -1:
            _check_int("top_k", self.top_k, 1, _INT32_MAX, also="-1 for no limit")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids:
                _check_int(f"{name}: token id", token_id, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens}: must not exceed max_tokens {self.max_tokens}"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(f"stop {shown(self.stop)}: must be non-empty strings")

    def _check_ranges(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias of token {token_id}", bias, -100.0, 100.0)


def _as_tuple(name: str, value: Iterable[_T]) -> tuple[_T, ...]:
    """Refuse what is no list, such as one value without its brackets."""
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} {shown(value)}: must be a list")
    return tuple(value)


def _check_int(name: str, value: int, low: int, high: int, also: str = "") -> None:
    """Refuse anything but an int in ``[low, high]``; bool is not an int here."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        extra = f", or {also}" if also else ""
        raise RequestError(f"{name} {shown(value)}: must be an integer from {low} to {high}{extra}")


def _check_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    """Refuse anything but a number in ``[low, high]``, or ``(low, high]``; NaN is in none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} {shown(value)}: must be a number {bounds}")
