"""How messages reach a scheduler and leave it."""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from minisgl.distributed.contract import Communicator
from minisgl.errors import IntegrityError
from minisgl.message.types import (
    AbortMsg,
    FinishedReq,
    ReplyMsg,
    ResultMsg,
    SchedulerMsg,
    UserMsg,
)
from minisgl.plugin.records import RequestRecord


class SchedulerIO(ABC):
    """The two ends of a scheduler's line to the world; called by its thread alone."""

    @abstractmethod
    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Return the messages that have come, in order.

        Args:
            block: Sleep until there is at least one. Otherwise the list may be empty.
        """

    @abstractmethod
    def send(self, replies: list[ReplyMsg]) -> None:
        """Send messages, in order; must not wait for their receiver."""


class OfflineIO(SchedulerIO):
    """Messages within a process: put requests in, take replies out, also from other threads."""

    def __init__(self) -> None:
        """Make an empty pair of queues."""
        self._inbox: SimpleQueue[SchedulerMsg] = SimpleQueue()
        self._outbox: deque[ReplyMsg] = deque()

    def put(self, messages: Iterable[SchedulerMsg]) -> None:
        """Hand messages to the scheduler, which takes them at its next step."""
        for message in messages:
            self._inbox.put(message)

    def take(self) -> list[ReplyMsg]:
        """Return the replies that have come since the last call."""
        replies = []
        while self._outbox:
            replies.append(self._outbox.popleft())
        return replies

    @property
    def has_messages(self) -> bool:
        """Whether the scheduler would receive something."""
        return not self._inbox.empty()

    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Take what was put in; see `SchedulerIO.receive`."""
        messages = [self._inbox.get()] if block else []
        while not self._inbox.empty():  # nobody else takes, so what is there stays there
            messages.append(self._inbox.get())
        return messages

    def send(self, replies: list[ReplyMsg]) -> None:
        """Keep replies until they are taken."""
        self._outbox.extend(replies)


class BroadcastIO(SchedulerIO):
    """Gives every rank of a tensor-parallel group the messages of rank 0, so that all decide alike.

    The whole list of each step travels, an empty one too: ranks must not differ in when they see a
    message.
    """

    def __init__(
        self,
        comm: Communicator,
        inner: SchedulerIO | None,
        encode: Callable[[list[SchedulerMsg]], bytes],
        decode: Callable[[bytes], list[SchedulerMsg]],
        digest: Callable[[], bytes] = bytes,
    ) -> None:
        """Stand around the line of rank 0.

        Args:
            comm: The group.
            inner: The line on rank 0, ``None`` on the others, which send nothing.
            encode: Packs messages.
            decode: Its inverse.
            digest: Sums up everything that this rank has decided so far; always as long. That of
                rank 0 travels with the messages.
        """
        assert (comm.rank == 0) == (inner is not None), "rank 0 alone has a line"
        self._comm = comm
        self._inner = inner
        self._encode = encode
        self._decode = decode
        self._digest = digest

    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Receive on rank 0 and hand on; the others sleep in the collective meanwhile.

        Raises:
            IntegrityError: This rank has decided other than rank 0 before.
        """
        if self._comm.size == 1 and self._inner is not None:
            return self._inner.receive(block)
        digest = self._digest()
        if self._inner is not None:
            messages = self._inner.receive(block)
            self._comm.broadcast_bytes(digest + self._encode(messages))
            return messages
        payload = self._comm.broadcast_bytes(None)
        if payload[: len(digest)] != digest:
            raise IntegrityError(
                f"rank {self._comm.rank} has parted from rank 0: their batches or sampled tokens "
                "differ"
            )
        return self._decode(payload[len(digest) :])

    def send(self, replies: list[ReplyMsg]) -> None:
        """Send from rank 0."""
        if self._inner is not None:
            self._inner.send(replies)


class DeadlineIO(SchedulerIO):
    """Adds an `AbortMsg` when the deadline of a request has passed.

    The clock is read here, around the line of one rank, and never by the scheduler: ranks that
    get the same messages then decide alike.
    """

    def __init__(self, inner: SchedulerIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch the messages of ``inner``.

        Args:
            inner: The line itself.
            clock: Seconds since whenever.
        """
        self._inner = inner
        self._clock = clock
        self._heap: list[tuple[float, int, float]] = []  # time of expiry, uid, deadline
        self._open: dict[int, float | None] = {}  # uid of each open request to its time of expiry

    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Receive, and add what has expired; a scheduler that blocks has no request that could."""
        messages = self._inner.receive(block)
        now = self._clock()
        for message in messages:
            # The scheduler drops one whose uid is open.
            if isinstance(message, UserMsg) and message.uid not in self._open:
                self._open[message.uid] = None
                if message.deadline_s is not None:
                    self._open[message.uid] = expiry = now + message.deadline_s
                    heapq.heappush(self._heap, (expiry, message.uid, message.deadline_s))
        while self._heap and self._heap[0][0] <= now:
            expiry, uid, deadline_s = heapq.heappop(self._heap)
            if self._open.get(uid) == expiry:
                messages.append(AbortMsg(uid, f"the deadline of {deadline_s:g} s has passed"))
        return messages

    def send(self, replies: list[ReplyMsg]) -> None:
        """Send, and stop watching what has finished."""
        for reply in replies:
            if isinstance(reply, ResultMsg):
                for finished in reply.finished:
                    self._open.pop(finished.uid, None)
        self._inner.send(replies)


class ObservedIO(SchedulerIO):
    """Tells an observer about each finished request, and how long it took."""

    def __init__(
        self,
        inner: SchedulerIO,
        on_request: Callable[[RequestRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch the messages of ``inner``.

        Args:
            inner: The line itself.
            on_request: Called after the terminal result was sent.
            clock: Seconds since whenever.
        """
        self._inner = inner
        self._on_request = on_request
        self._clock = clock
        self._arrival_s: dict[int, float] = {}
        self._first_token_s: dict[int, float] = {}

    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Receive, and note when requests arrive."""
        messages = self._inner.receive(block)
        now_s = self._clock()
        for message in messages:
            if isinstance(message, UserMsg):
                self._arrival_s.setdefault(message.uid, now_s)  # the first, as the scheduler does
        return messages

    def send(self, replies: list[ReplyMsg]) -> None:
        """Send, and report the requests that finished."""
        self._inner.send(replies)
        now_s = self._clock()
        for reply in replies:
            if isinstance(reply, ResultMsg):
                for uid in reply.uids:
                    self._first_token_s.setdefault(uid, now_s)
                for finished in reply.finished:
                    self._report(finished, now_s)

    def _report(self, finished: FinishedReq, now_s: float) -> None:
        """Make the record of a finished request."""
        arrival_s = self._arrival_s.pop(finished.uid, now_s)
        first_s = self._first_token_s.pop(finished.uid, None)
        self._on_request(
            RequestRecord(
                uid=finished.uid,
                finish_reason=finished.reason,
                num_prompt_tokens=finished.num_prompt_tokens,
                num_cached_tokens=finished.num_cached_tokens,
                num_output_tokens=finished.num_output_tokens,
                first_token_s=None if first_s is None else first_s - arrival_s,
                duration_s=now_s - arrival_s,
            )
        )
