"""Several ranks: rank 0 in this process, the others in processes that follow it."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import replace

from minisgl.config.placement import Placement
from minisgl.distributed.meeting import call_off_meeting
from minisgl.distributed.peers import RANK_ENDED
from minisgl.engine.build import build_engine
from minisgl.engine.engine import Engine
from minisgl.errors import CommError, MinisglError, WorkerError
from minisgl.message.folder import SocketFolder
from minisgl.message.types import AbortMsg, ExitMsg, SchedulerStats
from minisgl.message.wire import wire_codec
from minisgl.parallel.driver import Driver, DriverLock
from minisgl.parallel.followers import FollowerPlan, Followers, endpoints_in
from minisgl.parallel.ranks import RankRequest, Ranks
from minisgl.scheduler.lockstep import in_lockstep
from minisgl.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_EXPLAIN_S = 3.0  # a rank that others miss is seen to be gone within this time
_NOTICE_S = 0.5
_SHUTDOWN_S = 5.0
_LEAVE_S = 2.0  # of rank 0, once it has heard that the others are gone; see `Driver.stop`


class RankGroup(Ranks):
    """A tensor-parallel group, of which rank 0 and maybe all are on this machine.

    Rank 0 works in a thread of its own. Each of its steps begins with a broadcast of the messages
    that it takes in; the others wait for that broadcast, and do the same step. A rank that fails
    or dies ends the group: what is left of it would compute nonsense.
    """

    def __init__(
        self,
        request: RankRequest,
        start_followers: Callable[[FollowerPlan], Followers] = Followers,
    ) -> None:
        """Start the other ranks and build this one.

        Args:
            request: What to build.
            start_followers: Starts them.

        Raises:
            MinisglError: The error of the rank that failed.
        """
        settings = request.engine.settings
        self._line = request.line
        folder = SocketFolder()
        endpoints = endpoints_in(folder.path)
        rendezvous = Placement.of(settings.engine).rendezvous(endpoints.rendezvous)
        driver = Driver()

        def on_failure(error: MinisglError) -> None:
            driver.fail(error)
            call_off_meeting(rendezvous, str(error))

        followers = start_followers(FollowerPlan(settings, endpoints, on_failure))
        self._finalizer = weakref.finalize(self, _end, os.getpid(), driver, followers, folder)
        # A finalizer runs at exit by itself, but maybe after multiprocessing has begun to wait for
        # its children; what is registered last runs first.
        atexit.register(self._finalizer)
        self._driver, self._followers = driver, followers
        self.lock = DriverLock(driver)
        self._member = _Member(request, rendezvous, followers, driver)
        try:
            driver.call(self._member.build)
            followers.wait_until_ready(settings.engine.distributed_timeout_s)
        except BaseException as error:
            if not isinstance(error, MinisglError):  # Ctrl-C, while rank 0 waits for the others
                call_off_meeting(rendezvous, "the start was interrupted")
            self._finalizer()
            raise
        folder.remove()  # they have met; so nothing is left behind, however this process ends
        self.limits = self._member.engine.limits

    @property
    def failure(self) -> str:
        """See `Ranks.failure`."""
        return self._driver.failure

    @property
    def has_work(self) -> bool:
        """See `Ranks.has_work`."""
        return self._driver.call(lambda: self._member.scheduler.has_work)

    def step(self) -> None:
        """See `Ranks.step`. An interrupt ends only the waiting; the step goes on."""
        self._driver.call(self._member.step)

    def restart(self) -> None:
        """Abort every request; the books of a rank that has its own thread are never torn."""
        self._driver.call(self._member.abort_all)
        self._line.take()

    def stats(self) -> SchedulerStats:
        """See `Scheduler.stats`."""
        return self._driver.call(self._member.scheduler.stats)

    def check_integrity(self) -> None:
        """See `Scheduler.check_integrity`; of rank 0, which the others do not differ from."""
        self._driver.call(self._member.scheduler.check_integrity)

    def shutdown(self) -> None:
        """See `Ranks.shutdown`."""
        if not self._finalizer.alive:
            return
        try:
            self._driver.call(self._member.leave, _SHUTDOWN_S)
            self._followers.end(_SHUTDOWN_S)
        except (MinisglError, TimeoutError) as error:
            logger.debug("the ranks did not part in order: %s", error)
        finally:
            self._finalizer()
            atexit.unregister(self._finalizer)


class _Member:
    """Rank 0; used by its own thread alone once it is built."""

    engine: Engine
    scheduler: Scheduler

    def __init__(
        self, request: RankRequest, rendezvous: str, followers: Followers, driver: Driver
    ) -> None:
        engine = replace(
            request.engine,
            rank=0,
            init_method=rendezvous,
            on_lost=self._on_lost,
            on_tensor=self._check_wanted,
        )
        self._request = replace(request, engine=engine)
        self._followers = followers
        self._driver = driver
        self._is_built = False
        self._is_in_step = False

    def build(self) -> None:
        """Meet the others and build."""
        request = self._request
        try:
            self.engine = build_engine(request.engine)
            self._is_built = True
            traced, io = in_lockstep(
                self.engine, self.engine.comm, request.around(request.line), wire_codec()
            )
            self.scheduler = request.build_scheduler(traced, io)
        except Exception as error:
            self._give_up(error)
            raise

    def step(self) -> None:
        """Do a step together with the others."""
        assert not self._is_in_step, "an observer asked for a step within a step"
        self._is_in_step = True
        try:
            self.scheduler.step()
        except Exception as error:
            self._give_up(error)
            raise
        self._is_in_step = False

    def abort_all(self) -> None:
        """End every request, on all ranks alike."""
        self.step()  # takes in what is on the line
        self._request.line.put(AbortMsg(uid, "restarted") for uid in self.scheduler.open_uids)
        self.step()
        while self.scheduler.has_work:
            self.step()

    def leave(self) -> None:
        """Tell the others to exit, give every request its terminal result, and exit too."""
        self._request.line.put([ExitMsg()])
        self.step()
        self.scheduler.shutdown()
        self._request.end_recording()
        self.engine.shutdown()

    def _check_wanted(self) -> None:
        """Give up loading for a group that has ended."""
        if self._driver.failure:
            raise WorkerError(self._driver.failure)

    def _on_lost(self) -> None:
        """End the group because a rank is gone that nobody here has started."""
        self._driver.fail(self._followers.wait_for_failure(_NOTICE_S) or WorkerError(RANK_ENDED))
        self._followers.end()
        self._driver.post(self._let_go)  # it may have nothing to do that would fail

    def _give_up(self, error: Exception) -> None:
        """End the group after an error of this rank, or one that another rank has caused."""
        if isinstance(error, CommError):
            error = self._followers.wait_for_failure(_EXPLAIN_S) or WorkerError(str(error))
        self._driver.fail(error)
        self._followers.end()
        self._let_go()

    def _let_go(self) -> None:
        """End the engine after a failure: NCCL lets go of a lost rank when the graphs are gone."""
        if self._is_built:
            try:
                self.engine.shutdown()
            except Exception:
                logger.debug("the engine did not end in order", exc_info=True)


def _end(pid: int, driver: Driver, followers: Followers, folder: SocketFolder) -> None:
    """End every process of a group at once; after its shutdown there is none."""
    if os.getpid() != pid:
        return  # a fork of the process that owns them
    followers.end()
    driver.fail(WorkerError("the ranks were shut down"))
    driver.stop(_LEAVE_S)
    folder.remove()
