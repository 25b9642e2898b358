from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor
from umbra.runtime.errors import ActorNotFound, ProtocolError
from umbra.runtime.rpc.actor_ref import ActorRef


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


class HostedActors:
    """The actors on this node that another node's supervisor runs here; see `RemoteActor`.

    Args:
        start: starts an actor whose processes each wait for the event.
        keeps_warm: whether an actor whose caller is lost stays for the next one.
    """

    def __init__(
        self,
        start: Callable[[ActorSpec, asyncio.Event], SupervisedActor],
        keeps_warm: Callable[[SupervisedActor], bool],
    ) -> None:
        self._start = start
        self._keeps_warm = keeps_warm
        self._hosted: dict[str, _Hosted] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._hosted

    async def host(self, spec: ActorSpec) -> AsyncGenerator[dict[str, Any], None]:
        """Starts an actor, yields its state after every change, returns when it has ended for good.
        If the caller is lost, the actor ends, unless it is kept warm."""
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
                if not self._keeps_warm(hosted.actor):
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
