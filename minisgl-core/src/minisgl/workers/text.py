"""The loop of a tokenizer, a detokenizer, or both in one."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from minisgl.message.queues import PullQueue, PushQueue
from minisgl.message.text import CountMsg, DecodeMsg, LimitsMsg, StartedMsg, TokenizeMsg
from minisgl.message.types import (
    AbortMsg,
    ExitMsg,
    FlushReply,
    ResultMsg,
    StatsReply,
)
from minisgl.tokenizer.decoder import TextDecoder
from minisgl.tokenizer.encoder import PromptEncoder
from minisgl.tokenizer.pieces import TokenPieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class TextWorker:
    """Turns prompts into requests and tokens into text, whichever comes to its inbox."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        inbox: PullQueue,
        scheduler: PushQueue,
        server: PushQueue,
    ) -> None:
        """Work with a tokenizer.

        Args:
            tokenizer: The model's.
            inbox: What comes.
            scheduler: Takes requests and aborts.
            server: Takes text and refusals.
        """
        pieces = TokenPieces(tokenizer)
        self._encoder = PromptEncoder(tokenizer, pieces)
        self._decoder = TextDecoder(pieces)
        self._inbox = inbox
        self._scheduler = scheduler
        self._server = server

    def run_forever(self) -> None:
        """Work until an `ExitMsg` comes."""
        prompts: deque[object] = deque()
        while True:
            messages = self._inbox.receive(block=not prompts)
            # Running streams first, and again after each prompt: a long one may take its time.
            prompts += self._handle_results(messages)
            if not prompts:
                continue
            message = prompts.popleft()
            if isinstance(message, ExitMsg):
                return
            self._handle_prompt(message)

    def _handle_results(self, messages: list[object]) -> list[object]:
        """Turn tokens into text, and return the other messages."""
        others: list[object] = []
        replies: list[object] = []
        aborts: list[AbortMsg] = []
        for message in messages:
            match message:
                case StartedMsg():
                    self._decoder.start(message)
                case ResultMsg():
                    text, stopped = self._decoder.decode(message)
                    replies.append(text)
                    aborts += stopped
                case FlushReply() | StatsReply():
                    replies.append(message)
                case _:
                    others.append(message)
        if aborts:
            self._scheduler.send(aborts)
        if replies:
            self._server.send(replies)
        return others

    def _handle_prompt(self, message: object) -> None:
        match message:
            case TokenizeMsg():
                requests = self._encoder.tokenize(message)
                if isinstance(requests, list):
                    self._scheduler.send(requests)
                else:
                    self._server.send([requests])
            case AbortMsg():
                self._scheduler.send([message])
            case CountMsg():
                self._server.send([self._encoder.count(message)])
            case DecodeMsg():
                self._server.send([self._encoder.decode(message)])
            case LimitsMsg():
                self._encoder.limits = message
