"""Decides which rank and which engine is on which node and GPUs. Pure.

    GPU         0         1         2        3
    ranks       rank 0    rank 1
    hybrid      policy-0  policy-1                    shares the ranks' GPUs
    standalone                      other-0  other-1  gets GPUs without ranks
    colocated   judge-0   judge-1                     takes turns with a pool, on its GPUs

A plan depends on its input alone. A restart finds every process where it was, and an engine that
dies moves no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from umbra.runtime.errors import ConfigError

PoolMode = Literal["hybrid", "standalone", "colocated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host of the job.

    Attributes:
        gpus: its GPUs in the job's order and form: integers or UUIDs.
        num_ranks: ranks that use a GPU; local rank i has the i-th.
    """

    gpus: tuple[str, ...]
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """A pool whose engines need places.

    Attributes:
        num_gpus: of each engine, which is its tensor-parallel size; 0 on the CPU.
        count: engines of the job. None: as many as the GPUs hold, and 1 on the CPU.
        gpus: by hand: the GPUs of every node that the engines may use, by index. Engines and pools
            may then share a GPU. If empty, the mode decides.
        shares_with: the pool that takes turns with this one if it is colocated.
    """

    name: str
    mode: PoolMode
    num_gpus: int
    count: int | None = None
    gpus: tuple[int, ...] = ()
    shares_with: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The place of a rank or an engine.

    Attributes:
        node: its index.
        gpus: indices into the node's GPUs. For the process itself they are devices 0, 1, ...
    """

    node: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The places of all processes of a job that may use a GPU.

    Attributes:
        ranks: those with a GPU, by rank.
        engines: by pool, then by the engine's index.
    """

    nodes: tuple[Node, ...]
    ranks: tuple[Assignment, ...]
    engines: Mapping[str, tuple[Assignment, ...]]

    def visible_gpus(self, engine: Assignment) -> str:
        """CUDA_VISIBLE_DEVICES of an engine: its own GPUs, then all others of its node, because
        CUDA IPC cannot read memory on a GPU that is hidden."""
        gpus = self.nodes[engine.node].gpus
        others = [idx for idx in range(len(gpus)) if idx not in engine.gpus]
        return ",".join(gpus[idx] for idx in (*engine.gpus, *others))

    def table(self) -> list[str]:
        """The plan in lines, one for neighbouring GPUs with the same engines; none if no process
        has a GPU.

        GPUs  ranks  engines
        0-1   0-1    policy-0, judge-0
        """
        ranks = {(place.node, place.gpus[0]): rank for rank, place in enumerate(self.ranks)}
        engines: dict[tuple[int, int], list[str]] = {}
        for pool, places in self.engines.items():
            for idx, place in enumerate(places):
                for gpu in place.gpus:
                    engines.setdefault((place.node, gpu), []).append(engine_name(pool, idx))

        if not ranks and not engines:
            return []

        def processes(cell: tuple[int, int]) -> tuple[int, bool, list[str]]:
            return cell[0], cell in ranks, engines.get(cell, [])

        cells = [(idx, gpu) for idx, node in enumerate(self.nodes) for gpu in range(len(node.gpus))]
        rows = [("node", "GPUs", "ranks", "engines")]
        for (node, has_ranks, names), group in groupby(cells, processes):
            here = list(group)
            of_ranks = _span([ranks[cell] for cell in here]) if has_ranks else "-"
            gpus = _span([gpu for _, gpu in here])
            rows.append((str(node), gpus, of_ranks, ", ".join(names) or "-"))
        columns = list(zip(*rows, strict=True))[len(self.nodes) == 1 :]
        padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
        return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def engine_name(pool: str, idx: int) -> str:
    """The name of an engine's actor."""
    return f"{pool}-{idx}"


def plan_placement(nodes: Sequence[Node], pools: Sequence[PoolRequest]) -> Plan:
    """Places all ranks and engines of a job.

    GPUs that are chosen by hand are taken first, then those of pools with a number of engines,
    beginning with the largest engines, then those of pools that get what is left.

    Raises:
        ConfigError: a rank or an engine has no place.
    """
    for idx, node in enumerate(nodes):
        if node.num_ranks > len(node.gpus):
            raise ConfigError(
                f"node {idx} has {node.num_ranks} ranks and {len(node.gpus)} GPUs, and every rank "
                "needs a GPU of its own: start fewer ranks (--nproc-per-node)"
            )
    ranked = [list(range(node.num_ranks)) for node in nodes]
    free = [list(range(node.num_ranks, len(node.gpus))) for node in nodes]
    engines: dict[str, tuple[Assignment, ...]] = {}
    for pool in sorted(pools, key=_order):
        if pool.gpus:
            _check_by_hand(pool, nodes)
            usable = _Usable([list(pool.gpus) for _ in nodes], "those in gpus", "or name more GPUs")
        elif pool.mode == "colocated":
            usable = _Usable(
                _gpus_of(engines[pool.shares_with], len(nodes)),
                f"the GPUs of pool {pool.shares_with!r}",
                "or set mode to 'standalone'",
            )
        elif pool.mode == "hybrid" and any(ranked):
            usable = _Usable(ranked, "the ranks' GPUs", "or start more ranks (--nproc-per-node)")
        else:
            usable = _Usable(
                free,
                "the GPUs left without ranks and engines",
                "start fewer ranks (job.trainer_gpus_per_node), or set gpus to share some by hand",
            )
        engines[pool.name] = _place(pool, usable)
        taken = _gpus_of(engines[pool.name], len(nodes))
        free = [
            [gpu for gpu in gpus if gpu not in gone] for gpus, gone in zip(free, taken, strict=True)
        ]
    ranks = [Assignment(node=idx, gpus=(gpu,)) for idx, gpus in enumerate(ranked) for gpu in gpus]
    return Plan(
        nodes=tuple(nodes),
        ranks=tuple(ranks),
        engines={pool.name: engines[pool.name] for pool in pools},
    )


class _Usable(NamedTuple):
    """GPUs by node that the engines of a pool may get; what they are, and what gives more."""

    gpus: Sequence[Sequence[int]]
    what: str
    remedy: str


def _order(pool: PoolRequest) -> tuple[bool, bool, bool, int]:
    return not pool.gpus, pool.mode == "colocated", pool.count is None, -pool.num_gpus


def _place(pool: PoolRequest, usable: _Usable) -> tuple[Assignment, ...]:
    """Gives each engine the next GPUs of one node."""
    size = pool.num_gpus
    if size == 0:
        return (Assignment(node=0, gpus=()),) * (pool.count or 1)
    places = [
        Assignment(node=idx, gpus=tuple(gpus[first : first + size]))
        for idx, gpus in enumerate(usable.gpus)
        for first in range(0, len(gpus) - size + 1, size)
    ]
    count = pool.count or max(1, len(places))
    if count > len(places):
        sizes = " + ".join(str(len(gpus)) for gpus in usable.gpus)
        raise ConfigError(
            f"pool {pool.name!r}: its engines need {count} x {size} GPUs, and {usable.what} are "
            f"{sizes} in number, enough for {len(places)}: lower count or the "
            f"tensor-parallel size, {usable.remedy}"
        )
    return tuple(places[:count])


def _check_by_hand(pool: PoolRequest, nodes: Sequence[Node]) -> None:
    """Raises ConfigError if a node lacks one of the GPUs, or an engine would get one twice."""
    if pool.num_gpus == 0:
        raise ConfigError(f"pool {pool.name!r}: gpus is set, and its engines are on the CPU")
    for idx, node in enumerate(nodes):
        if (last := max(pool.gpus)) >= len(node.gpus):
            raise ConfigError(
                f"pool {pool.name!r}: gpus has {last}, and node {idx} has {len(node.gpus)} GPUs: "
                "use numbers from 0, in the order of CUDA_VISIBLE_DEVICES"
            )
    for first in range(0, len(pool.gpus), pool.num_gpus):
        own = pool.gpus[first : first + pool.num_gpus]
        if len(set(own)) < len(own):
            raise ConfigError(
                f"pool {pool.name!r}: gpus gives one engine the GPUs {list(own)}: name different "
                f"ones, {pool.num_gpus} for each engine"
            )


def _gpus_of(places: Sequence[Assignment], num_nodes: int) -> list[list[int]]:
    """The GPUs of a pool, by node."""
    return [
        list(dict.fromkeys(gpu for place in places if place.node == idx for gpu in place.gpus))
        for idx in range(num_nodes)
    ]


def _span(numbers: Sequence[int]) -> str:
    """Consecutive numbers, such as 0-3."""
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}-{last}"
