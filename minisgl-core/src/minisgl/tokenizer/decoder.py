"""The detokenizer's side of the process line: steps of tokens in, steps of text out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minisgl.message.text import FinishedText, StartedMsg, TextLogprob, TextMsg
from minisgl.message.types import AbortMsg, FinishedReq, ResultMsg, TokenLogprobs
from minisgl.tokenizer.detokenize import IncrementalDetokenizer
from minisgl.tokenizer.pieces import TokenPieces

_LOGPROB_FLOOR = -9999.0  # JSON has no infinity
_HELD_BACK = -1


@dataclass(slots=True)
class _Open:
    """A request whose text is being made; changed by `TextDecoder` alone."""

    text: IncrementalDetokenizer
    num_tokens: int = 0
    is_stopped: bool = False


class TextDecoder:
    """Keeps one detokenizer per request, from `StartedMsg` to its terminal result."""

    def __init__(self, pieces: TokenPieces) -> None:
        """Decode with the pieces of a tokenizer."""
        self._pieces = pieces
        self._open: dict[int, _Open] = {}

    @property
    def num_open(self) -> int:
        """Requests without a terminal result."""
        return len(self._open)

    def start(self, message: StartedMsg) -> None:
        """Expect the tokens of a request, unless one of its uid is open: that one goes on."""
        if message.uid in self._open:
            return
        params = message.sampling_params
        text = IncrementalDetokenizer(
            self._pieces, params.skip_special_tokens, tuple(params.stop), params.min_tokens
        )
        self._open[message.uid] = _Open(text)

    def decode(self, result: ResultMsg) -> tuple[TextMsg, list[AbortMsg]]:
        """Turn a step's tokens into text.

        Returns:
            The text, and what the scheduler is to stop because a stop string was found.
        """
        message = TextMsg([], [], [])
        aborts = []
        silent: dict[int, int] = {}  # uid to the index of the token that ended it
        if result.finished:
            stopped = {f.uid for f in result.finished if f.stop_token_id is not None}
            silent = {uid: i for i, uid in enumerate(result.uids) if uid in stopped}
        for uid, logprobs in result.prompt_logprobs.items():
            if uid in self._open:
                message.prompt_logprobs[uid] = [self._logprob(each) for each in logprobs]
        for i, (uid, token_id) in enumerate(zip(result.uids, result.token_ids, strict=True)):
            each = self._open.get(uid)
            if each is None or each.is_stopped:
                continue  # was on its way when a stop string was found
            each.num_tokens += 1
            if silent.get(uid) == i:
                continue  # has no text of its own
            text = each.text.push((token_id,))
            if i in result.logprobs:
                message.logprobs[len(message.uids)] = self._logprob(result.logprobs[i])
            _add(message, uid, text, token_id)
            if each.text.stop_reason is not None:
                each.is_stopped = True
                aborts.append(AbortMsg(uid, "a stop string was found"))
        for finished in result.finished:
            self._finish(finished, message)
        return message, aborts

    def _finish(self, result: FinishedReq, message: TextMsg) -> None:
        """Give out the rest of a text, and forget the request."""
        each = self._open.pop(result.uid, None)
        if each is None:
            return
        if not each.is_stopped and (rest := each.text.finish()):
            _add(message, result.uid, rest, _HELD_BACK)
        stop_string = each.text.stop_reason
        is_stop = stop_string is not None
        message.finished.append(
            FinishedText(
                uid=result.uid,
                reason="stop" if is_stop else result.reason,
                detail="" if is_stop else result.detail,
                refusal=result.refusal,
                stop_reason=stop_string if is_stop else result.stop_token_id,
                num_prompt_tokens=result.num_prompt_tokens,
                num_output_tokens=each.num_tokens,
                num_cached_tokens=result.num_cached_tokens,
            )
        )

    def _logprob(self, logprobs: TokenLogprobs) -> TextLogprob:
        return TextLogprob(
            token=self._pieces.token_bytes(logprobs.token_id),
            token_id=logprobs.token_id,
            logprob=_finite(logprobs.logprob),
            top=[self._pieces.token_bytes(token_id) for token_id in logprobs.top_ids],
            top_ids=list(logprobs.top_ids),
            top_logprobs=[_finite(value) for value in logprobs.top_logprobs],
        )


def _add(message: TextMsg, uid: int, text: str, token_id: int) -> None:
    message.uids.append(uid)
    message.texts.append(text)
    message.token_ids.append(token_id)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOGPROB_FLOOR
