"""The tokenizer's side of the process line: prompts in, requests for the scheduler out."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from minisgl.errors import RequestError
from minisgl.message.text import (
    ChatPrompt,
    CountMsg,
    DecodedReply,
    DecodeMsg,
    LimitsMsg,
    RefusedMsg,
    TokenizeMsg,
    TokensReply,
)
from minisgl.message.types import UserMsg
from minisgl.tokenizer.chat import ChatOptions, encode_chat, render_chat
from minisgl.tokenizer.encode import encode_text
from minisgl.tokenizer.pieces import TokenPieces
from minisgl.tokenizer.span import text_span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEED_RANGE = 2**63
_DEFAULT_TIMEOUT_S = 20.0


class PromptEncoder:
    """Tokenizes prompts; a prompt that cannot be is refused, and only that one.

    Attributes:
        limits: Set when the engine has told; prompts that cannot run are then refused here, with
            the numbers.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pieces: TokenPieces,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        """Use a tokenizer.

        Args:
            tokenizer: The model's.
            pieces: Of the same tokenizer.
            timeout_s: A chat template is a program, and may run so long.
        """
        self.limits: LimitsMsg | None = None
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._span = text_span(tokenizer)
        self._timeout_s = timeout_s

    def tokenize(self, message: TokenizeMsg) -> list[UserMsg] | RefusedMsg:
        """Make the requests of a prompt."""
        try:
            ids = self._encode(message.prompt, message.add_special_tokens, must_fit=True)
        except RequestError as error:
            return RefusedMsg(message.uids, str(error))
        array = np.array(ids, dtype=np.int32)
        params = message.sampling_params
        requests = []
        for index, uid in enumerate(message.uids):
            each = params
            if index and params.seed is not None:
                each = replace(params, seed=(params.seed + index) % _SEED_RANGE)
            requests.append(UserMsg(uid, array, each, message.priority, message.deadline_s))
        return requests

    def count(self, message: CountMsg) -> TokensReply | RefusedMsg:
        """Tokenize a prompt for its own sake."""
        try:
            ids = self._encode(message.prompt, message.add_special_tokens, message.must_fit)
        except RequestError as error:
            return RefusedMsg([message.uid], str(error))
        texts = [self._pieces.token_bytes(i).decode(errors="replace") for i in ids]
        return TokensReply(message.uid, ids, texts)

    def decode(self, message: DecodeMsg) -> DecodedReply | RefusedMsg:
        """Turn ids into text."""
        try:
            self._check_vocabulary(message.token_ids)
        except RequestError as error:
            return RefusedMsg([message.uid], str(error))
        text = self._pieces.decode(message.token_ids, message.skip_special_tokens)
        return DecodedReply(message.uid, text)

    def _encode(
        self, prompt: str | list[int] | ChatPrompt, add_special_tokens: bool, must_fit: bool
    ) -> list[int]:
        if isinstance(prompt, list):
            ids = prompt
        elif isinstance(prompt, str):
            if must_fit:
                self._check_length(prompt)
            ids = encode_text(self._tokenizer, prompt, add_special_tokens)
        else:
            ids = self._encode_chat(prompt, must_fit)
        if must_fit:
            self._check(ids)
        else:
            self._check_vocabulary(ids, "prompt: ")
        return ids

    def _encode_chat(self, prompt: ChatPrompt, must_fit: bool) -> list[int]:
        messages = json.loads(prompt.messages)
        options = ChatOptions(
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            template=prompt.template,
            template_kwargs=json.loads(prompt.template_kwargs),
        )
        with _time_limit(self._timeout_s):
            if must_fit and self._is_too_long(prompt.messages):
                # What counts is what the template makes, which may leave out most of it.
                self._check_length(render_chat(self._tokenizer, messages, options))
            return encode_chat(self._tokenizer, messages, options)

    def _is_too_long(self, text: str) -> bool:
        """Return whether a text cannot fit; tokenizing it would tell, but late."""
        if self.limits is None or self._span is None:
            return False
        return self._span.least_tokens(text) >= self.limits.max_seq_len

    def _check_length(self, text: str) -> None:
        if self._is_too_long(text):
            assert self._span is not None, "it is what tells"
            raise RequestError(
                f"prompt: has {len(text)} characters, and a token has at most "
                f"{self._span.most_characters}; {self._room()}"
            )

    def _check(self, ids: list[int]) -> None:
        """Refuse what the scheduler would refuse, in the words of whoever wrote the request."""
        if not ids:
            raise RequestError("prompt: is empty; at least one token is needed")
        self._check_vocabulary(ids, "prompt: ")
        if self.limits is not None and len(ids) >= self.limits.max_seq_len:
            raise RequestError(f"prompt: has {len(ids)} tokens; {self._room()}")

    def _room(self) -> str:
        assert self.limits is not None, "there is a limit"
        return (
            f"prompt and output together may have {self.limits.max_seq_len}, and at least one is "
            "sampled, even with max_tokens 0"
        )

    def _check_vocabulary(self, ids: list[int], where: str = "") -> None:
        if self.limits is None or not ids:
            return
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self.limits.vocab_size:
                raise RequestError(
                    f"{where}token id {token_id}: must be from 0 to {self.limits.vocab_size - 1}"
                )


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `RequestError` inside the block when it takes too long; on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise RequestError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
