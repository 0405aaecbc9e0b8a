"""One sequence on its way from the scheduler's tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from minisgl.completion import Choice, TokenLogprob, Usage
from minisgl.engine.contract import TokenLogprobs
from minisgl.message.types import FinishedReq
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.detokenize import IncrementalDetokenizer
from minisgl.tokenizer.pieces import TokenPieces


class Generation:
    """Collects the tokens of one request; changed by `add` and `finish`.

    Attributes:
        uid: The request's number.
        token_ids: Generated so far.
        text: Shown so far; final text when `is_finished`.
        is_finished: Whether the text is complete. The scheduler may not know yet: a stop string
            is found here, and whoever owns this tells the scheduler to stop.
        is_ended: Whether the scheduler's terminal result has come.
    """

    def __init__(
        self, uid: int, prompt_len: int, params: SamplingParams, pieces: TokenPieces
    ) -> None:
        """Start before the first token."""
        self.uid = uid
        self.token_ids: list[int] = []
        self.text = ""
        self.is_finished = False
        self.is_ended = False
        self._prompt_len = prompt_len
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]  # nothing comes before the first token
        self._params = params
        self._pieces = pieces
        self._reason = ""
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._num_cached = 0

    @cached_property
    def _detokenizer(self) -> IncrementalDetokenizer:
        """Made for the first token: before it, the device waits for the host."""
        params = self._params
        return IncrementalDetokenizer(
            self._pieces, params.skip_special_tokens, tuple(params.stop), params.min_tokens
        )

    def add_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take the log-probabilities of the next prompt tokens."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(map(_logprob, logprobs))

    def add(self, token_id: int, logprobs: TokenLogprobs | None, has_text: bool) -> None:
        """Take one token.

        Args:
            token_id: The token.
            logprobs: Its log-probabilities, if they were asked for.
            has_text: False for the end-of-sequence or stop token that ends the request.
        """
        if self.is_finished:
            return  # it was already on its way when a stop string was found
        self.token_ids.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(_logprob(logprobs))
        if has_text:
            self.text += self._detokenizer.push((token_id,))
            if self._detokenizer.stop_reason is not None:
                self._complete("stop", self._detokenizer.stop_reason)

    def finish(self, result: FinishedReq) -> None:
        """Take the scheduler's terminal result."""
        self.is_ended = True
        self._num_cached = result.num_cached_tokens
        if self.is_finished:
            return
        self.text += self._detokenizer.finish()
        found = self._detokenizer.stop_reason
        self._error = result.detail or None
        self._complete("stop" if found else result.reason, found or result.stop_token_id)

    def choice(self) -> Choice:
        """Return the finished result."""
        return Choice(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self._reason,
            stop_reason=self._stop_reason,
            error=self._error,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _complete(self, reason: str, stop_reason: str | int | None) -> None:
        self.is_finished = True
        self._reason = reason
        self._stop_reason = stop_reason

    @staticmethod
    def usage(generations: Sequence[Generation]) -> Usage:
        """Count the tokens of all choices of one prompt."""
        num_prompt = generations[0]._prompt_len
        num_output = sum(len(g.token_ids) for g in generations)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            cached_tokens=generations[0]._num_cached,
        )


def _logprob(logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)),
    )
