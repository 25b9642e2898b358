from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor
from umbra.runtime.engine_api.engine_names import FOLLOWER_TARGET
from umbra.runtime.errors import UmbraError
from umbra.runtime.rpc.rpc_client import Client

logger = logging.getLogger(__name__)

# Time for each call that brings an engine to rest. A shorter limit ends engines that wake a large
# model; a longer one delays the new ranks, which wait for `SessionConfig.attach_timeout_s`.
_REST_LIMIT_S: Final = 15.0


class WarmEngines:
    """Engines of this node that outlive the pools of an epoch. Owned by the supervisor.

        pools of an epoch end ─▶ the nodes meet again ─▶ keep: at rest ─▶ take: in a new pool
                                                                  └──▶ end: no pool uses it

    The pool that takes one over, maybe another node's, knows nothing of its last pool. Pools stay
    as they are unless `nodes_may_change`.
    """

    def __init__(self, client: Client, *, nodes_may_change: bool) -> None:
        self._client = client
        self.nodes_may_change = nodes_may_change
        self._engines: dict[str, SupervisedActor] = {}

    @staticmethod
    def may_keep(actor: SupervisedActor) -> bool:
        """Whether it can be brought to rest: it runs, on this node only, with the
        trainer's weights."""
        spec = actor.spec
        if spec.role != "engine" or spec.target == FOLLOWER_TARGET or spec.kwargs.get("followers"):
            return False
        is_usable = actor.state == ActorState.RUNNING and not actor.is_stopping
        return is_usable and not spec.kwargs.get("load_weights")

    def outlives_ranks(self, actor: SupervisedActor) -> bool:
        """Whether ranks that are started again can use it."""
        return self.may_keep(actor) if self.nodes_may_change else actor.spec.role == "engine"

    def outlives_lead(self, actor: SupervisedActor) -> bool:
        return self.nodes_may_change and self.may_keep(actor)

    async def keep(self, actors: Iterable[SupervisedActor]) -> None:
        """Makes engines awake, idle, and without an update, as a new pool expects; others end.
        Called when no pool of the last epoch calls them any more."""
        kept = [actor for actor in actors if self.may_keep(actor)]
        async with asyncio.TaskGroup() as tasks:
            for actor in kept:
                tasks.create_task(self._bring_to_rest(actor))
        self._engines = {actor.spec.name: actor for actor in kept if self.may_keep(actor)}

    async def _bring_to_rest(self, actor: SupervisedActor) -> None:
        if actor.ref is None:
            return
        engine = self._client.handle(actor.ref)
        try:
            await engine.call("abort_update", timeout_s=_REST_LIMIT_S)
            await engine.call("wake", ["weights", "kv_cache"], timeout_s=_REST_LIMIT_S)
            await engine.call("pause", "abort", timeout_s=_REST_LIMIT_S)
        except UmbraError as error:
            logger.warning("%s is not kept warm: %s", actor.spec.name, error)
            actor.stop()
            await actor.ended.wait()

    def specs(self) -> list[ActorSpec]:
        return [actor.spec for actor in self._engines.values()]

    def take(self, name: str, may_start: asyncio.Event) -> SupervisedActor | None:
        actor = self._engines.pop(name, None)
        if actor is not None:
            actor.wait_for(may_start)
        return actor

    def end(self, names: Iterable[str]) -> list[SupervisedActor]:
        unused = [self._engines.pop(name) for name in names if name in self._engines]
        for actor in unused:
            actor.stop()
        return unused
