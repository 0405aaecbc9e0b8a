"""From generated tokens to the text that a client sees, while it is being generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minisgl.tokenizer.pieces import TokenPieces
from minisgl.tokenizer.stop import StopMatcher


class IncrementalDetokenizer:
    """The text of one completion; the owner drops it when the request ends or is aborted.

    Text is given out once it is final: no half characters, and nothing that may be the beginning
    of a stop string. All pieces together equal the text that is made of all tokens at once.
    """

    __slots__ = ("_matcher", "_min_tokens", "_num_early_chars", "_num_tokens", "_stream")

    def __init__(
        self,
        pieces: TokenPieces,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """Start with the first generated token; the prompt has no part in the text.

        Args:
            pieces: Of the model's tokenizer; shared by all requests.
            skip_special_tokens: Leave special tokens out of the text.
            stop: Strings that end the text.
            min_tokens: A stop string must end in what later tokens than these write. A character
                is written by the token that completes it.
        """
        self._stream = pieces.stream(skip_special_tokens)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_early_chars = 0  # to come from the stream, but of the first tokens

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found; the request is to be ended then."""
        return self._matcher.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the new text.

        The token that ended the request (an end-of-sequence or stop token) is not pushed: it has
        no text of its own. Tokens after a stop string are ignored.
        """
        shown = []
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            text = self._stream.push(token_id)
            self._num_tokens += 1
            shown.append(self._search(text))
            if self._num_tokens == self._min_tokens:
                # A newline may be a byte whose text comes only with the next token.
                self._num_early_chars = self._stream.num_pending()
        return "".join(shown)

    def finish(self) -> str:
        """Return the rest of the text: what was held back for a character or a stop string."""
        if self._matcher.matched is not None:
            return ""
        shown = self._search(self._stream.finish())
        return shown if self._matcher.matched is not None else shown + self._matcher.finish()

    def _search(self, text: str) -> str:
        """Look for stop strings in the next text, and return what can be shown."""
        if self._num_tokens <= self._min_tokens:
            return self._matcher.push(text, len(text))
        num_early = min(self._num_early_chars, len(text))
        self._num_early_chars -= num_early
        return self._matcher.push(text, num_early)
