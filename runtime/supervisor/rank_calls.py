from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from umbra.runtime.actor.job_rules import AfterRanks
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.cluster.attached_ranks import AttachedRank
from umbra.runtime.errors import DeadlineExceeded, JobFailed
from umbra.runtime.pools.job_pools import JobPools
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.process.process_end import PidWatch
from umbra.runtime.reports.hang_bundle import JobBundles
from umbra.runtime.waiting import first_of

logger = logging.getLogger(__name__)

# The news of a process's death may come this late after its broken connections. Longer delays every
# report of a rank; shorter names the wrong process on a busy machine.
_DEATH_NEWS_LIMIT_S: Final = 0.5
# Time to end the old ranks' actors: their grace, and the reaping.
_START_OVER_LIMIT_S: Final = 60.0
# How long engines stay warm on a node without ranks. Shorter: they start again where torchrun's
# rendezvous takes long. Longer: they stay longer on a node that is cut off, whose torchrun waits
# for the rendezvous.
_WARM_LIMIT_S: Final = 120.0


class RankCalls:
    """The supervisor's calls for the ranks of its node: they attach, fail, stop and leave, and
    torchrun starts them again. `end_without_ranks` ends the job here if it starts none."""

    def __init__(
        self,
        context: NodeContext,
        pools: JobPools,
        bundles: JobBundles,
        end_without_ranks: Callable[[], None],
    ) -> None:
        self._end_without_ranks = end_without_ranks
        self._context = context
        self._rules = context.rules
        self._ranks = context.ranks
        self._links = context.links
        self._pools = pools
        self._bundles = bundles
        self._round_id = ""  # of torchrun's rendezvous
        self._started_over = asyncio.Event()
        self._started_over.set()

    async def attach(
        self,
        rank: int,
        local_world_size: int,
        pid: int,
        incarnation: int,
        may_restart: bool,
        round_id: str = "",
    ) -> AsyncGenerator[dict[str, Any], None]:
        """A rank's stream of events, open as long as the rank lives: its end is noticed here.

        Events: {"kind": "attached", "tcp_endpoint", "epoch", "job"}, {"kind": "failed", "message"},
        {"kind": "note", "text"}, {"kind": "signal", "number", "grace_s"}, {"kind": "nodes",
        "nodes", "epoch"}. `round_id` is torchrun's, see `TorchrunEnvironment`.
        """
        is_new_round = self._round_id not in ("", round_id)
        if is_new_round and process_stat(pid) is None:
            return  # torchrun ends all ranks before the next round: it was a rank of an earlier one
        if incarnation > self._ranks.incarnation or is_new_round:
            if self._rules.is_for_good:
                raise JobFailed("the job was stopped; torchrun is about to end")
            self._start_over(incarnation)
        self._rules.may_restart = may_restart
        self._round_id = round_id
        try:
            async with asyncio.timeout(_START_OVER_LIMIT_S):
                await self._started_over.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"actors of the ranks before their restart have not ended within "
                f"{_START_OVER_LIMIT_S:.0f} s; see the supervisor's log"
            ) from None
        details = {"tcp_endpoint": self._links.tcp_endpoint, "epoch": self._links.epoch}
        me = self._ranks.add(rank, pid, **details, job=self._links.job)
        # The supervisor notices its death before its peers can report broken connections.
        watch = PidWatch(pid, lambda: me.put({"kind": "gone"}))
        try:
            while True:
                event = await me.events.get()
                if event["kind"] in ("detached", "gone"):
                    return
                yield event
        finally:
            watch.close()
            if self._ranks.remove(me):
                self._on_rank_gone(me, local_world_size)

    def detach(self, rank: int) -> None:
        """Called by a rank before it leaves: its stream of events ends, and its end is expected."""
        self._ranks.detach(rank)

    async def fail_job(self, who: str, message: str, missed_deadline: bool = False) -> str:
        """Called by a rank: the job is lost. Every rank is notified; the first failure counts.

        A rank whose collective broke because another died is often faster than the news of that
        death, so its report waits a moment for it. If it `missed_deadline`, a bundle shows the
        processes before they end; the returned text, for the end of the error, says what it shows
        and where it is.
        """
        await self._ranks.await_failure(_DEATH_NEWS_LIMIT_S)
        found = ""
        if missed_deadline and not self._ranks.has_failed:
            found = await self._bundles.late(f"{who} failed: {message}")
        self._ranks.fail(who, f"{message}\n{found}" if found else message)
        return found

    def pass_on_signal(self, rank: int, incarnation: int, number: int) -> None:
        """Called by a rank that got a stop signal, which may have reached it alone."""
        if incarnation == self._ranks.incarnation:
            self._context.job_stop.request()
        cause = f"rank {rank} got {signal.Signals(number).name}"
        self._ranks.pass_on_signal(cause, incarnation, number)

    def _start_over(self, incarnation: int) -> None:
        """Torchrun has restarted the ranks: the old ranks' actors end, and engines stay warm. Their
        weights are no longer valid, so they wait for a sync of the new ranks."""
        logger.info("the ranks were restarted (incarnation %d)", incarnation)
        text = f"torchrun has restarted the ranks ({incarnation})"
        self._context.record(text, "restart", "ranks")
        self._context.job_stop.withdraw()
        self._rules.start_over()
        for rank in self._ranks.start_over(incarnation):
            self._pools.rank_lost(rank)
        if self._rules.has_epochs:
            self._links.start_over()
            self._ranks.forget_nodes()
        if self._started_over.is_set():  # else the actors of an earlier restart are still ending
            self._started_over.clear()
            self._context.tasks.create_task(self._end_all_but_engines(), name="start-over")

    async def _end_all_but_engines(self) -> None:
        try:
            await self._pools.start_over()
        except DeadlineExceeded as error:
            self._ranks.fail("starting over", str(error))
            self._context.over.set()
            return
        self._started_over.set()

    def _on_rank_gone(self, gone: AttachedRank, local_world_size: int) -> None:
        if not self._ranks.has_detached(gone.rank):
            self._pools.rank_lost(gone.rank)
            self._ranks.fail(
                f"rank {gone.rank}",
                f"its process (pid {gone.pid}) ended without a report: it was killed (out of "
                "memory?) or crashed; see its last output",
            )
        if len(self._ranks):
            return
        match self._rules.after_last_rank(
            has_failed=self._ranks.has_failed,
            was_stopped=self._ranks.was_stopped,
            have_all_detached=self._ranks.num_detached >= local_world_size,
        ):
            case AfterRanks.OVER:
                self._context.over.set()
            case AfterRanks.KEEP_ENGINES:
                self._pools.stop_others()  # this node may be cut off, and another one have its role
                self._context.tasks.create_task(self._await_ranks(), name="await-ranks")
            case AfterRanks.KEEP:
                pass

    async def _await_ranks(self) -> None:
        """Ends the job here if torchrun starts no ranks on this node."""
        try:
            async with asyncio.timeout(_WARM_LIMIT_S):
                await first_of(self._ranks.attached, self._context.over)
        except TimeoutError:
            logger.info("no ranks for %g s: ending the engines", _WARM_LIMIT_S)
            self._end_without_ranks()
