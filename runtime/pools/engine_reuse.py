"""Chooses the engines that a pool takes over when the nodes of a job have met again. Pure.

    last epoch   node 0: policy-0    node 1: policy-1    node 2: policy-2
    node 1 is lost
    this epoch   node 0: policy-0    node 1: policy-2                        both still run
    a node comes
    then         node 0: policy-0    node 1: policy-2    node 2: policy-3    a new one

An engine keeps its process and its name if the pool would start an equal one on its node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.cluster.placement import engine_idx, engine_name
from umbra.runtime.settings import to_wire

_VARYING_ARGUMENTS: Final = frozenset({"num_threads"})
"""Depend on the number of engines in the job; another number makes an engine faster or slower."""

WarmSpecs = Mapping[int, Sequence[ActorSpec]]
"""Engines of the last epoch that still run, by node."""


def reuse_engines(
    pool: str, planned: Sequence[ActorSpec], nodes: Sequence[int], warm: WarmSpecs
) -> tuple[list[ActorSpec], dict[int, list[str]]]:
    """Returns the pool's engines, and by node the names of warm ones that it does not use.
    `planned` and `nodes` are the engines as if none ran."""
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
