from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import ConnectionLost, UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher, Moved
from umbra.runtime.rollout.dispatch.engine_link import EngineLink
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.rollout_config import DispatchConfig
from umbra.runtime.rpc.actor_ref import ActorRef

logger = logging.getLogger(__name__)

# Delay before a link that ended is opened again while its engine is reported as serving. Shorter
# only repeats the failure; longer leaves the engine idle.
_RELINK_DELAY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class EngineView:
    engine: EngineId
    state: EngineState
    version: int | None
    ref: ActorRef | None


class Fleet:
    """Follows the states of a pool's engines; owns a link to each engine that serves."""

    def __init__(
        self,
        config: DispatchConfig,
        context: ActorContext,
        dispatcher: Dispatcher,
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._context = context
        self._dispatcher = dispatcher
        self._note = note
        self._views: dict[str, EngineView] = {}
        self._by_state: defaultdict[EngineState, dict[str, EngineId]] = defaultdict(dict)
        self._links: dict[EngineId, EngineLink] = {}
        self._link_tasks: dict[EngineId, asyncio.Task[None]] = {}
        self._version: int | None = None

    @property
    def current_version(self) -> int | None:
        """The pool's version: the newest that any of its engines has held."""
        return self._version

    @property
    def pending(self) -> list[EngineId]:
        return list(self._by_state[EngineState.PENDING_WEIGHTS].values())

    @property
    def is_serving(self) -> bool:
        return bool(self._by_state[EngineState.SERVING])

    @property
    def views(self) -> list[EngineView]:
        return sorted(self._views.values(), key=lambda view: view.engine)

    def describe(self) -> str:
        """`engine0#1 SERVING, engine1#2 STARTING`."""
        return ", ".join(f"{view.engine} {view.state}" for view in self.views) or "no engines"

    async def run(self, on_report: Callable[[], None]) -> None:
        """Follows the pool until cancelled, and calls `on_report` after each report. Raises
        UmbraError when the supervisor was lost or has no such pool."""
        pool = self._config.pool
        async with asyncio.TaskGroup() as tasks:
            # No deadline per item: a pool that does not change sends nothing.
            stream = self._context.supervisor.stream("watch_pool", pool, timeout_s=None)
            async with stream as reports:
                async for report in reports:
                    self._observe(report, tasks)
                    on_report()
            raise ConnectionLost(f"the supervisor ended its reports on pool {pool!r}")

    def _observe(self, report: Mapping[str, Any], tasks: asyncio.TaskGroup) -> None:
        engine = EngineId(report["engine"], report["incarnation"])
        view = EngineView(engine, EngineState(report["state"]), report["version"], report["ref"])
        before = self._views.get(engine.name)
        if before is not None:
            del self._by_state[before.state][engine.name]
        self._views[engine.name] = view
        self._by_state[view.state][engine.name] = engine
        self._dispatcher.idleness.report(engine, view.state)
        logger.info("%s is %s (version %s)", engine, view.state, view.version)
        if view.version is not None:
            self._version = max(view.version, self._version or 0)
        if before is not None and before.engine != engine:
            self._end(before.engine)
        if view.state == EngineState.DEAD:
            self._end(engine)
            if report["has_ended"]:
                del self._views[engine.name], self._by_state[view.state][engine.name]
                self._dispatcher.idleness.forget(engine.name)
            return
        serving = view.state == EngineState.SERVING
        if serving and engine not in self._link_tasks and view.ref is not None:
            task = tasks.create_task(self._keep_link(engine, view.ref), name=f"link:{engine}")
            self._link_tasks[engine] = task
        elif engine in self._links:
            self._links[engine].set_serving(serving)

    def _end(self, engine: EngineId) -> None:
        task = self._link_tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    async def _keep_link(self, engine: EngineId, ref: ActorRef) -> None:
        """Links to one incarnation of an engine until the supervisor reports its end."""
        handle = self._context.client.handle(ref)  # pinned: must not follow to the next incarnation
        must_greet = False
        while True:
            link = EngineLink(
                engine,
                handle,
                self._dispatcher,
                delta_timeout_s=self._config.delta_timeout_s,
                submit_timeout_s=self._config.submit_timeout_s,
                must_greet=must_greet,
            )
            reason = ""
            self._links[engine] = link
            self._dispatcher.attach(engine, link)
            try:
                link.set_serving(self._views[engine.name].state == EngineState.SERVING)
                await link.run()
            except UmbraError as error:
                reason = str(error)
            finally:
                if not reason:  # cancelled, by `_end` or because this manager stops
                    stops = engine in self._link_tasks
                    reason = "this manager stops" if stops else "its process ended"
                del self._links[engine]
                self._report_loss(engine, self._dispatcher.detach(engine), reason)
            must_greet = True
            await asyncio.sleep(_RELINK_DELAY_S)  # ended early by `_end` when the engine is dead

    def _report_loss(self, engine: EngineId, moved: Moved, reason: str) -> None:
        if moved.num_trajectories == 0:
            logger.info("%s is no longer linked: %s", engine, reason)
            return
        others = [
            str(view.engine)
            for view in self._views.values()
            if view.state == EngineState.SERVING and view.engine != engine
        ]
        where = f"on {', '.join(others)}" if others else "as soon as an engine serves"
        self._note(
            f"{engine} was lost ({reason}): {moved.num_trajectories} trajectories keep their "
            f"{moved.num_tokens} tokens and resume {where}"
        )
