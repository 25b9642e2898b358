from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import (
    ConnectionLost,
    DeadlineExceeded,
    EngineError,
    IllegalTransition,
    RemoteError,
    RequestRefused,
    UmbraError,
    first_leaf,
)
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher, Moved
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.rollout_config import DispatchConfig
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.rpc.wire import ActorRef

logger = logging.getLogger(__name__)

# Delay before a link that ended is opened again while its engine is reported as serving. Shorter
# only repeats the failure; longer leaves the engine idle.
_RELINK_DELAY_S: Final = 1.0
# Wait for the report of the death of an engine that failed a request. Shorter blames the request
# for it; longer leaves an engine that fails one request alone idle.
_FAILURE_PAUSE_S: Final = 1.0

# Requests in one submit call. More delays the first of them and makes the connection keep a buffer
# of that size; fewer costs a round trip each.
_MAX_SUBMIT: Final = 64
# Batches that an engine may send ahead: at one per tick, most of a second of a busy manager.
_DELTA_CREDITS: Final = 16
# Longest wait for a state report of an engine that refused requests although it was reported as
# serving: its report of a pause is on the way. Shorter repeats the refusal; longer leaves the
# engine idle if no report comes.
_REFUSAL_PAUSE_S: Final = 0.2


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


class EngineLink:
    """Carries the dispatcher's turns to one engine, and reads its `deltas` stream. The link ends if
    a serving engine that has work is silent for `delta_timeout_s`. `must_greet` is for an engine
    that was lost before: it gets no work before it has sent something.

        Dispatcher --send--> outgoing --submit()--> engine
            ^------------------ deltas() -------------|

    The dispatcher decides which requests go out, and what follows when they fail.
    """

    def __init__(
        self,
        engine: EngineId,
        handle: Handle,
        dispatcher: Dispatcher,
        *,
        delta_timeout_s: float,
        submit_timeout_s: float,
        must_greet: bool = False,
    ) -> None:
        self.engine = engine
        self._handle = handle
        self._dispatcher = dispatcher
        self._delta_timeout_s = delta_timeout_s
        self._submit_timeout_s = submit_timeout_s
        self._outgoing: dict[int, dict[str, Any]] = {}  # bounded by the router's max_inflight
        self._withdrawn: list[int] = []
        self._pending = asyncio.Event()
        self._attached = asyncio.Event()  # the engine's stream has begun to send
        self._reported = asyncio.Event()  # a state was reported since the last submit began
        self._silence_timeout: asyncio.Timeout | None = None
        self._serving = False
        self._is_trusted = not must_greet

    def send(self, request: dict[str, Any]) -> None:
        was_idle = self._dispatcher.num_inflight(self.engine) <= 1
        self._outgoing[request["id"]] = request
        self._pending.set()
        if was_idle:
            self._reset_silence_timeout()

    def withdraw(self, request_ids: list[int]) -> None:
        self._withdrawn += [rid for rid in request_ids if self._outgoing.pop(rid, None) is None]
        self._pending.set()

    def set_serving(self, serving: bool) -> None:
        """An engine that does not serve may stay silent."""
        self._serving = serving
        self._reported.set()
        self._dispatcher.set_serving(self.engine, serving and self._is_trusted)
        self._reset_silence_timeout()

    async def run(self) -> None:
        """Runs while the engine can be reached; raises UmbraError with the reason when it ends."""
        # Neither part raises. Before Python 3.13 a TaskGroup whose child fails while it is being
        # cancelled forgets the cancellation, and one whose child fails leaves one pending.
        async with asyncio.TaskGroup() as tasks:
            parts = [
                tasks.create_task(_error_of(self._receive())),
                tasks.create_task(_error_of(self._submit())),
            ]
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                part.cancel()
        raise done.pop().result()

    async def _receive(self) -> None:
        try:
            async with asyncio.timeout(None) as self._silence_timeout:
                await self._receive_deltas()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.engine} holds {self._dispatcher.num_inflight(self.engine)} requests and "
                f"has sent nothing for {self._delta_timeout_s:.3g} s"
            ) from None
        finally:
            self._silence_timeout = None

    async def _receive_deltas(self) -> None:
        self._reset_silence_timeout()
        # No deadline per item: an idle engine is silent. `_silence_timeout` watches the busy one.
        stream = self._handle.stream("deltas", timeout_s=None, credits=_DELTA_CREDITS)
        async with stream as batches:
            async for item in batches:
                self._attached.set()
                self._dispatcher.on_batch(self.engine, DeltaBatch.from_wire(item))
                self._reset_silence_timeout()
                if not self._is_trusted:
                    self._is_trusted = True
                    self.set_serving(self._serving)
        raise ConnectionLost(f"{self.engine} ended its stream of deltas")

    def _reset_silence_timeout(self) -> None:
        if self._silence_timeout is None or self._silence_timeout.expired():
            return
        busy = self._serving and self._dispatcher.num_inflight(self.engine) > 0
        now = asyncio.get_running_loop().time()
        self._silence_timeout.reschedule(now + self._delta_timeout_s if busy else None)

    async def _submit(self) -> None:
        # The engine's first batch shows that the stream is this link's. An engine may not know yet
        # that an earlier manager died, and drops that manager's requests with its stream.
        await self._attached.wait()
        while True:
            await self._pending.wait()
            self._pending.clear()
            while self._withdrawn or self._outgoing:
                withdrawn, self._withdrawn = self._withdrawn, []
                if withdrawn:
                    await self._call("abort", withdrawn)
                first = list(itertools.islice(self._outgoing, _MAX_SUBMIT))
                requests = [self._outgoing.pop(request_id) for request_id in first]
                if requests:
                    await self._submit_batch(requests)

    async def _submit_batch(self, requests: list[dict[str, Any]]) -> None:
        self._reported.clear()
        failed = await self._find_failed(requests)
        if failed:
            self._dispatcher.set_serving(self.engine, False)
            await self._wait_for_report(_FAILURE_PAUSE_S)
            for request_id, reason in failed.items():
                self._dispatcher.fail_attempt(self.engine, request_id, reason)
            self.set_serving(self._serving)

    async def _find_failed(self, requests: list[dict[str, Any]]) -> dict[int, str]:
        """Submits requests, and returns the error of each one that the engine fails alone."""
        ids = [request["id"] for request in requests]
        try:
            await self._call("submit", requests)
        except IllegalTransition as error:
            logger.warning("%s takes no requests now: %s", self.engine, error)
            self._dispatcher.hand_back(self.engine, ids)
            await self._wait_for_report(_REFUSAL_PAUSE_S)
            self.set_serving(self._serving)
        except (EngineError, RemoteError) as error:
            if len(requests) > 1:  # single submits find out which one spoiled the batch
                failed = [await self._find_failed([request]) for request in requests]
                return {request_id: reason for one in failed for request_id, reason in one.items()}
            if isinstance(error, EngineError):
                return {ids[0]: str(error)}
            is_refusal = error.remote_type == "builtins.ValueError"
            reason = error.remote_message if is_refusal else str(error)
            refusal = RequestRefused(f"{self.engine} refused a request: {reason}")
            self._dispatcher.refuse(self.engine, ids[0], refusal)
        return {}

    async def _wait_for_report(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._reported.wait()

    async def _call(self, method: str, argument: object) -> None:
        await self._handle.call(method, argument, timeout_s=self._submit_timeout_s)


async def _error_of(work: Coroutine[Any, Any, None]) -> UmbraError:
    """Runs work that ends only by an error, and returns that error."""
    try:
        await work
    except UmbraError as error:
        return error
    except BaseExceptionGroup as group:
        cause = first_leaf(group)
        if isinstance(cause, UmbraError):
            return cause
        raise
    return ConnectionLost("the link ended")
