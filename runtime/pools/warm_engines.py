from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.supervised_actor import SupervisedActor
from umbra.runtime.cluster.placement import engine_idx, engine_name
from umbra.runtime.errors import UmbraError
from umbra.runtime.settings import to_wire

logger = logging.getLogger(__name__)

# Time for each call that brings an engine to rest. A shorter limit ends engines that wake a large
# model; a longer one delays the new ranks, which wait for `SessionConfig.attach_timeout_s`.
_REST_LIMIT_S: Final = 15.0

_VARYING_ARGUMENTS: Final = frozenset({"num_threads"})
"""Depend on the number of engines in the job; another number makes an engine faster or slower."""

WarmSpecs = Mapping[int, Sequence[ActorSpec]]
"""Engines of the last epoch that still run, by node."""


class WarmEngines:
    """Engines of this node that outlive the pools of an epoch. Owned by the supervisor.

        pools of an epoch end ─▶ the nodes meet again ─▶ keep: at rest ─▶ take: in a new pool
                                                                  └──▶ end: no pool uses it

    The pool that takes one over, maybe another node's, knows nothing of its last pool.
    """

    def __init__(self, context: NodeContext) -> None:
        self._client = context.client
        self._rules = context.rules
        self._engines: dict[str, SupervisedActor] = {}

    async def keep(self, actors: Iterable[SupervisedActor]) -> None:
        """Makes engines awake, idle, and without an update, as a new pool expects; others end.
        Called when no pool of the last epoch calls them any more."""
        kept = [actor for actor in actors if self._rules.outlives_pools(actor)]
        async with asyncio.TaskGroup() as tasks:
            for actor in kept:
                tasks.create_task(self._bring_to_rest(actor))
        self._engines = {
            actor.spec.name: actor for actor in kept if self._rules.outlives_pools(actor)
        }

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


def reuse_engines(
    pool: str, planned: Sequence[ActorSpec], nodes: Sequence[int], warm: WarmSpecs
) -> tuple[list[ActorSpec], dict[int, list[str]]]:
    """Returns the pool's engines, and by node the names of warm ones that it does not use.
    `planned` and `nodes` are the engines as if none ran.

        last epoch   node 0: policy-0    node 1: policy-1    node 2: policy-2
        node 1 is lost
        this epoch   node 0: policy-0    node 1: policy-2                        both still run
        a node comes
        then         node 0: policy-0    node 1: policy-2    node 2: policy-3    a new one

    An engine keeps its process and its name if the pool would start an equal one on its node.
    """
    left = {
        node: {spec.name: spec for spec in specs if _pool_of(spec.name) == pool}
        for node, specs in warm.items()
    }
    known = [engine_idx(name) for specs in left.values() for name in specs]
    next_idx = max(known, default=-1) + 1
    taken: set[str] = set()
    engines: list[ActorSpec] = []
    for spec, node in zip(planned, nodes, strict=True):
        same = next(
            (
                name
                for name, other in left.get(node, {}).items()
                if name not in taken and _settings(other) == _settings(spec)
            ),
            None,
        )
        if same is not None:
            taken.add(same)
            engines.append(left[node].pop(same))
        elif known:
            engines.append(replace(spec, name=engine_name(pool, next_idx)))
            next_idx += 1
        else:
            engines.append(spec)
    return engines, {node: list(specs) for node, specs in left.items() if specs}


def _settings(spec: ActorSpec) -> dict[str, Any]:
    """All settings but the name, in the form that they have after a message."""
    settings: dict[str, Any] = to_wire(replace(spec, name="engine"))
    arguments = settings["kwargs"].items()
    settings["kwargs"] = {k: value for k, value in arguments if k not in _VARYING_ARGUMENTS}
    return settings


def _pool_of(name: str) -> str:
    return name.rpartition("-")[0]
