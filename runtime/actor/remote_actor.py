from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_rules import JobRules
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor, await_end_of_lost
from umbra.runtime.errors import (
    ActorDied,
    ActorNotFound,
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    RemoteError,
    TransportError,
    UmbraError,
    brief,
)
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import to_wire
from umbra.runtime.waiting import first_of

logger = logging.getLogger(__name__)

_CALL_LIMIT_S: Final = 10.0


class RemoteActor:
    """An actor on another node, as the supervisor that runs it there sees it.

        RemoteActor ── host_actor ───────────────▶ supervisor there    a stream of states comes back
                    ── command_hosted ───────────▶                     permit, stop, restart, kill

    The supervisor there starts the process, restarts it and watches it like its own. `run` lives
    until the actor has ended for good. `epoch` is the one in which the two nodes met.
    """

    def __init__(
        self,
        spec: ActorSpec,
        there: Handle,
        epoch: int,
        may_start: asyncio.Event,
        on_change: Callable[[RemoteActor], None],
    ) -> None:
        self.spec = spec
        self.state = ActorState.STARTING
        self.incarnation = 0
        self.ref: ActorRef | None = None
        self.pid = 0
        self.has_process = False
        self.has_run = False
        self.ended = asyncio.Event()
        self.is_node_lost = False
        self.failure = ""
        self._there = there
        self._epoch = epoch
        self._may_start = may_start
        self._on_change = on_change
        self._num_restarts = 0
        self._changed = asyncio.Condition()
        self._stop = asyncio.Event()
        self._permits: list[asyncio.Task[None]] = []  # that wait for `may_start`
        self._commands: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    def stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._command("stop")

    async def restart(self, timeout_s: float) -> ActorRef:
        command = self._epoch, "restart", self.spec.name, timeout_s
        try:
            ref: ActorRef = await self._there.call(
                "command_hosted", *command, timeout_s=timeout_s + 0.25
            )
        except (ActorNotFound, ConnectionLost) as error:
            raise ActorDied(self.failure or f"{self.spec.name} is lost: {error}") from error
        return ref

    def kill(self, reason: str) -> None:
        self._command("kill", self.incarnation, reason)

    async def failed_to_wake(self) -> None:
        self._command("failed_to_wake")

    def woke(self) -> None:
        self._command("woke")

    async def wait_running(self, timeout_s: float, lost_incarnation: int = 0) -> ActorRef:
        try:
            async with asyncio.timeout(timeout_s):
                async with self._changed:
                    if lost_incarnation == self.incarnation:
                        await await_end_of_lost(
                            self._changed, lambda: self.state, self.spec.grace_s
                        )
                    await self._changed.wait_for(lambda: self.state != ActorState.STARTING)
                if self.ref is None:
                    await self.ended.wait()  # who hears of its end may use its name again
        except TimeoutError:
            raise DeadlineExceeded(f"{self.spec.name} was not ready in {timeout_s:.3g} s") from None
        if self.ref is None:
            raise ActorDied(self.failure or f"{self.spec.name} was stopped")
        return self.ref

    async def run(self) -> None:
        """Follows the process. Any end of the stream of its states ends the actor."""
        why = f"{self.spec.name} was stopped"
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._send_commands())
                try:
                    await self._follow(tasks)
                finally:
                    for task in (sending, *self._permits):
                        task.cancel()
        except* TransportError as group:
            self.is_node_lost = True
            why = f"{self.spec.name} is lost, because its node was: {group.exceptions[0]}"
        except* UmbraError as group:
            why = f"{self.spec.name} could not be started: {group.exceptions[0]}"
        if self.state not in (ActorState.STOPPED, ActorState.FAILED):
            state = ActorState.STOPPED if self.is_stopping else ActorState.FAILED
            await self._enter({"state": state, "failure": why})
        self.ended.set()

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        # No deadline per item: a process that does not change reports nothing. Its link notices the
        # loss of the node and drops the connection.
        arguments = self._epoch, to_wire(self.spec)
        async with self._there.stream("host_actor", *arguments, timeout_s=None) as states:
            async for state in states:
                await self._enter(state)
                if self.state == ActorState.STARTING and not self.has_process:
                    self._permits = [task for task in self._permits if not task.done()]
                    self._permits.append(tasks.create_task(self._permit(self.incarnation)))

    async def _permit(self, ended_incarnation: int) -> None:
        """Lets the next process start, whose incarnation counts from here on."""
        await first_of(self._may_start, self._stop)
        if not self.is_stopping and self.incarnation == ended_incarnation:
            self.incarnation += 1
            self.has_process = True
            self._command("permit")

    async def _enter(self, state: dict[str, Any]) -> None:
        async with self._changed:
            self.state = ActorState(state["state"])
            self.has_run = self.has_run or self.state == ActorState.RUNNING
            self.failure = str(state["failure"])
            self.ref = None
            if "ref" in state:
                if not isinstance(state["ref"], ActorRef | None):
                    raise ProtocolError(f"not the state of an actor: {brief(state)}")
                self.ref = state["ref"]
                self.incarnation = int(state["incarnation"])
                self.pid = int(state["pid"])
                self.has_process = bool(state["has_process"])
                self._num_restarts = int(state["num_restarts"])
            else:
                self.has_process = False
            self._changed.notify_all()
        self._on_change(self)

    def _command(self, command: str, *arguments: object) -> None:
        self._commands.put_nowait((command, self.spec.name, *arguments))

    async def _send_commands(self) -> None:
        while True:
            command = await self._commands.get()
            with suppress(RemoteError):  # the actor has ended: the stream says how
                arguments = self._epoch, *command
                await self._there.call("command_hosted", *arguments, timeout_s=_CALL_LIMIT_S)


class _Hosted:
    def __init__(self, actor: SupervisedActor, may_start: asyncio.Event) -> None:
        self.actor = actor
        self.may_start = may_start
        self.changed = asyncio.Event()

    def describe(self) -> dict[str, Any]:
        actor = self.actor
        return {
            "state": str(actor.state),
            "ref": actor.ref,
            "incarnation": actor.incarnation,
            "pid": actor.pid,
            "has_process": actor.has_process,
            "num_restarts": actor.num_restarts,
            "failure": actor.failure,
        }


ActorProcess = SupervisedActor | RemoteActor


class HostedActors:
    """The actors on this node that another node's supervisor runs here; see `RemoteActor`. `start`
    starts an actor whose processes each wait for the event."""

    def __init__(
        self,
        start: Callable[[ActorSpec, asyncio.Event], SupervisedActor],
        rules: JobRules,
    ) -> None:
        self._start = start
        self._rules = rules
        self._hosted: dict[str, _Hosted] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._hosted

    async def host(self, spec: ActorSpec) -> AsyncGenerator[dict[str, Any], None]:
        """Starts an actor, yields its state after every change, returns when it has ended for good.
        If the caller is lost, the actor ends, unless the next epoch's pools can use it."""
        may_start = asyncio.Event()
        hosted = self._hosted[spec.name] = _Hosted(self._start(spec, may_start), may_start)
        try:
            while True:
                hosted.changed.clear()
                yield hosted.describe()
                if hosted.actor.state in (ActorState.STOPPED, ActorState.FAILED):
                    return
                await hosted.changed.wait()
        finally:
            if self._hosted.get(spec.name) is hosted:  # else another caller has it by now
                del self._hosted[spec.name]
                if not self._rules.outlives_pools(hosted.actor):
                    hosted.actor.stop()

    def on_actor_change(self, actor: SupervisedActor) -> None:
        """Called after each change of any actor of this node."""
        hosted = self._hosted.get(actor.spec.name)
        if hosted is not None:
            if actor.state == ActorState.RUNNING or not actor.has_process:
                hosted.may_start.clear()  # a permit is for one process, also if it did not start
            hosted.changed.set()

    async def command(self, command: str, name: str, *arguments: Any) -> ActorRef | None:
        """Obeys the other supervisor. "restart" returns the next incarnation's address
        once it serves."""
        if name not in self._hosted:
            raise ActorNotFound(f"no other node has an actor {name!r} here")
        hosted = self._hosted[name]
        match command, arguments:
            case "permit", ():
                hosted.may_start.set()
            case "stop", ():
                hosted.actor.stop()
            case "restart", (float(timeout_s),):
                return await hosted.actor.restart(timeout_s)
            case "kill", (int(incarnation), str(reason)):
                if incarnation == hosted.actor.incarnation:
                    hosted.actor.kill(reason)
            case "failed_to_wake", ():
                await hosted.actor.failed_to_wake()
            case "woke", ():
                hosted.actor.woke()
            case _:
                raise ProtocolError(f"not a command to an actor: {command!r}{arguments}")
        return None
