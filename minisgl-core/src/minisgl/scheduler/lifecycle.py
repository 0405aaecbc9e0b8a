"""From arrival to the one terminal result, and what is taken back after it."""

from __future__ import annotations

import logging

import numpy as np

from minisgl.engine.contract import EngineLimits
from minisgl.errors import CapacityError, MinisglError, RequestError
from minisgl.message.types import FinishedReq, FinishReason, RefusalCode, UserMsg
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import ScheduledReq
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.outbox import Outbox
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.table import TableManager

logger = logging.getLogger(__name__)


class Lifecycle:
    """Takes requests in and ends them; the only one that does.

    A request that ends while a launched step computes it gives its row and pages back only when
    that step has been settled; until then it is a ghost.
    """

    def __init__(
        self,
        limits: EngineLimits,
        config: SchedulerConfig,
        prefill: PrefillManager,
        decode: DecodeManager,
        cache: CacheManager,
        table: TableManager,
        outbox: Outbox,
    ) -> None:
        """Start without requests."""
        self.settled_step = 0
        self.num_finished: dict[FinishReason, int] = {
            "stop": 0,
            "length": 0,
            "abort": 0,
            "error": 0,
        }
        self.num_retractions = 0
        self._limits = limits
        self._max_open = config.max_open_reqs(limits.max_running_reqs)
        self._prefill = prefill
        self._decode = decode
        self._cache = cache
        self._table = table
        self._outbox = outbox
        self._active: dict[int, ScheduledReq] = {}
        self._ghosts: list[ScheduledReq] = []
        self._num_arrived = 0
        pool_len = limits.num_pages * limits.page_size
        # The last sampled token needs no KV, so a sequence may be one longer than the pool.
        self._max_len = min(limits.max_seq_len, pool_len + 1)
        self._bound = (
            f"the context limit is {limits.max_seq_len} tokens"
            if limits.max_seq_len <= pool_len + 1
            else f"the KV pool holds {pool_len} tokens"
        )

    @property
    def active(self) -> list[ScheduledReq]:
        """Every request without a terminal result, in order of arrival; a copy."""
        return list(self._active.values())

    def find(self, uid: int) -> ScheduledReq | None:
        """Return the request of that uid unless it is unknown or finished."""
        return self._active.get(uid)

    def accept(self, msg: UserMsg) -> None:
        """Queue a request, or refuse it with an error result that says what would do.

        One whose uid is that of an open request is dropped: a result would be taken for the other.
        """
        if msg.uid in self._active:
            logger.error("request %s is open; another one of that uid is dropped", msg.uid)
            return
        try:
            req = self._make_req(msg)
        except RequestError as error:
            self._refuse(msg.uid, str(error), "invalid")
            return
        except CapacityError as error:
            self._refuse(msg.uid, str(error), "full")
            return
        except Exception as error:
            logger.exception("request %s could not be read", msg.uid)
            self._refuse(msg.uid, describe(error))
            return
        self._num_arrived += 1
        req.arrival = self._num_arrived
        self._active[req.uid] = req
        self._prefill.add(req)

    def finish(
        self,
        req: ScheduledReq,
        reason: FinishReason,
        detail: str = "",
        stop_token_id: int | None = None,
    ) -> None:
        """Make the terminal result of ``req`` and take back what it holds as soon as can be."""
        self._report(req, reason, detail, stop_token_id)
        if req.table_idx < 0:
            return
        if req.last_step > self.settled_step:
            self._ghosts.append(req)
        else:
            self.release(req)

    def fail(self, req: ScheduledReq, error: Exception) -> None:
        """End ``req``, which no launched step holds, by a fault; the KV it made is not kept."""
        self._report(req, "error", describe(error))
        if req.table_idx >= 0:
            self.release(req, is_valid=False)

    def release(self, req: ScheduledReq, is_valid: bool = True) -> None:
        """Take row and pages back; no launched step may hold them."""
        self._cache.release(req, is_valid)
        self._table.give_back(req)
        self._prefill.wake()

    def retract(self, req: ScheduledReq) -> None:
        """Send a running request, which no launched step holds, back to the queue.

        Its tokens stay, and the cache keeps its KV as long as there is room.
        """
        assert req.last_step <= self.settled_step, "a launched step still holds the request"
        self._decode.remove(req)
        self._prefill.discard(req)
        self.release(req)
        req.num_retractions += 1
        self.num_retractions += 1
        self._prefill.put_back(req)
        logger.debug("request %s retracted with %s tokens", req.uid, req.num_tokens)

    def settle(self, step: int) -> None:
        """Account for step ``step``, and so for all before it, having run."""
        self.settled_step = step
        self._cache.settle(step)
        if self._ghosts:
            for req in self._ghosts:
                if req.last_step <= step:
                    self.release(req)
            self._ghosts = [req for req in self._ghosts if req.last_step > step]

    def end_running(self, step: int, reason: FinishReason, detail: str) -> None:
        """End every request that holds a row, after steps were lost.

        What a lost step wrote is unknown, and later steps may have built on it, so no KV is kept.
        Waiting requests are not affected.

        Args:
            step: Newest launched step; the engine is done with all of them.
            reason: For the terminal results.
            detail: For the terminal results.
        """
        self.settled_step = step
        for req in self._ghosts:
            self.release(req, is_valid=False)
        self._ghosts = []
        for req in self._table.owners:
            self._report(req, reason, detail)
            self.release(req, is_valid=False)
        self._cache.settle(step)
        self._cache.flush()

    def _refuse(self, uid: int, detail: str, code: RefusalCode = "") -> None:
        """Send the terminal result of a request that never was."""
        self._outbox.finished.append(FinishedReq(uid, "error", detail, refusal=code))
        self.num_finished["error"] += 1
        logger.debug("request %s refused: %s", uid, detail)

    def _report(
        self,
        req: ScheduledReq,
        reason: FinishReason,
        detail: str,
        stop_token_id: int | None = None,
    ) -> None:
        """Send the terminal result, and let nobody choose ``req`` any more."""
        assert not req.is_finished, f"{req} has a terminal result already"
        req.is_finished = True
        del self._active[req.uid]
        self._prefill.discard(req)
        self._decode.refresh()
        self.num_finished[reason] += 1
        self._outbox.finished.append(
            FinishedReq(
                uid=req.uid,
                reason=reason,
                detail=detail,
                stop_token_id=stop_token_id,
                num_prompt_tokens=req.prompt_len,
                num_output_tokens=req.num_tokens - req.prompt_len,
                num_cached_tokens=req.num_cached_prompt_tokens,
            )
        )

    def _make_req(self, msg: UserMsg) -> ScheduledReq:
        """Check a request and make its books.

        Raises:
            RequestError: It can never run.
            CapacityError: Too many wait.
        """
        ids = self._checked_ids(msg.input_ids)
        num_open = len(self._active)
        if self._max_open is not None and num_open >= self._max_open:
            raise CapacityError(
                f"the queue is full: {num_open} requests run or wait, at most {self._max_open} may"
            )
        params = msg.sampling_params
        params.check_vocabulary(self._limits.vocab_size)
        max_len = self._max_len
        if params.max_tokens is not None:
            # A prompt always samples; one that nothing should follow drops its token.
            max_len = min(max_len, len(ids) + max(1, params.max_tokens))
        req = ScheduledReq(msg.uid, ids, max_len, params)
        req.priority = msg.priority
        req.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            req.stop_ids |= self._limits.eos_token_ids
        return req

    def _checked_ids(self, input_ids: np.ndarray) -> np.ndarray:
        """Return the prompt as int32, or raise `RequestError`."""
        ids = np.asarray(input_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RequestError(
                f"prompt of shape {ids.shape} and type {ids.dtype}: must be a list of token ids"
            )
        if ids.size == 0:
            raise RequestError("the prompt is empty: it must have at least 1 token")
        if ids.size >= self._max_len:
            raise RequestError(
                f"the prompt has {ids.size} tokens: {self._bound}, so it may have at most "
                f"{self._max_len - 1}"
            )
        # As unsigned numbers, negative ones are too large as well: one pass over a long prompt.
        if ids.dtype == np.int32 and ids.view(np.uint32).max() < self._limits.vocab_size:
            return ids
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._limits.vocab_size:
            raise RequestError(
                f"token id {low if low < 0 else high}: must be from 0 to "
                f"{self._limits.vocab_size - 1}"
            )
        return ids.astype(np.int32, copy=False)


def describe(error: Exception) -> str:
    """Name a fault in a terminal result."""
    if isinstance(error, MinisglError):
        return str(error)
    return f"internal error: {type(error).__name__}: {error}"
