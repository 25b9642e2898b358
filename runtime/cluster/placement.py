"""Places ranks and engines on nodes and GPUs. Pure.

    GPU         0         1         2        3
    ranks       rank 0    rank 1
    hybrid      policy-0  policy-1                    shares the ranks' GPUs
    standalone                      other-0  other-1  gets GPUs without ranks
    colocated   judge-0   judge-1                     is time-sliced with a pool, on its GPUs

An engine that needs more GPUs than a node has takes all GPUs of several nodes. Its leading part, on
the first of them, is the engine for everybody else; the others have a follower each.

A plan depends on its input alone: a restart finds every process in place, and an engine that dies
moves no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple

from umbra.runtime.errors import ConfigError

PoolMode = Literal["hybrid", "standalone", "colocated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host of the job. Local rank i has the i-th of `gpus`, which are integers or UUIDs in the
    job's order. `address` is "" in a job of one node."""

    gpus: tuple[str, ...]
    num_ranks: int
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """A pool whose engines need places.

    Attributes:
        num_gpus: GPUs of one engine, its tensor-parallel size; 0 on the CPU. If no node has as
            many, an engine spans nodes.
        count: engines on these nodes, maybe 0. None: one for every `num_gpus` GPUs of the pool,
            or, on the CPU, one for each of its nodes.
        nodes: indices of the user's nodes for the engines; empty: any.
        gpus: indices of the user's GPUs on each of these nodes, which engines and pools may
            then share; empty: the mode decides.
        shares_with: name of the pool that a colocated one is time-sliced with.
    """

    name: str
    mode: PoolMode
    num_gpus: int
    count: int | None = None
    nodes: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    shares_with: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The place of a rank or an engine. Its process sees `gpus`, indices into the node's, as
    devices 0, 1, ... `followers` are the parts of an engine on later nodes."""

    node: int
    gpus: tuple[int, ...]
    followers: tuple[Assignment, ...] = ()

    @property
    def parts(self) -> tuple[Assignment, ...]:
        return (self, *self.followers)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGpus:
    """The GPUs of an engine's process: `own` ones to compute on, and `others` of its node that it
    only sees, because CUDA IPC cannot read memory on a hidden GPU."""

    own: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES of the process: its own GPUs first."""
        return ",".join((*self.own, *self.others))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerPlace:
    node: int
    gpus: EngineGpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The places of all processes that may use a GPU. By pool: engines by index, GPUs of one
    engine, and the size of a KV cache where the memory plan chose it."""

    nodes: tuple[Node, ...]
    ranks: tuple[Assignment, ...]
    engines: Mapping[str, tuple[Assignment, ...]]
    num_gpus: Mapping[str, int]
    kv_num_tokens: Mapping[str, int] = field(default_factory=dict[str, int])

    def engine_gpus(self, pool: str) -> tuple[EngineGpus, ...]:
        return tuple(map(self._gpus_at, self.engines[pool]))

    def engine_followers(self, pool: str) -> tuple[tuple[FollowerPlace, ...], ...]:
        return tuple(
            tuple(
                FollowerPlace(node=part.node, gpus=self._gpus_at(part)) for part in place.followers
            )
            for place in self.engines[pool]
        )

    def _gpus_at(self, place: Assignment) -> EngineGpus:
        gpus = self.nodes[place.node].gpus
        others = tuple(gpu for idx, gpu in enumerate(gpus) if idx not in place.gpus)
        return EngineGpus(own=tuple(gpus[idx] for idx in place.gpus), others=others)

    def table(self, more: Mapping[str, Mapping[tuple[int, int], str]] = {}) -> list[str]:
        """The plan in lines, neighbouring GPUs with equal entries in one; none if no
        process has a GPU.

            GPUs  ranks  engines
            0-1   0-1    policy-0, judge-0
        """
        ranks = {(place.node, place.gpus[0]): rank for rank, place in enumerate(self.ranks)}
        engines: dict[tuple[int, int], list[str]] = {}
        for pool, places in self.engines.items():
            for idx, place in enumerate(places):
                for number, part in enumerate(place.parts):
                    name = follower_name(pool, idx, number) if number else engine_name(pool, idx)
                    for gpu in part.gpus:
                        engines.setdefault((part.node, gpu), []).append(name)

        if not ranks and not engines:
            return []

        def known(cell: tuple[int, int]) -> tuple[int, bool, list[str], list[str]]:
            others = [column.get(cell, "-") for column in more.values()]
            return cell[0], cell in ranks, engines.get(cell, []), others

        cells = [(idx, gpu) for idx, node in enumerate(self.nodes) for gpu in range(len(node.gpus))]
        rows = [("node", "GPUs", "ranks", "engines", *more)]
        for (node, has_ranks, names, others), group in groupby(cells, known):
            here = list(group)
            of_ranks = _span([ranks[cell] for cell in here]) if has_ranks else "-"
            gpus = _span([gpu for _, gpu in here])
            rows.append((str(node), gpus, of_ranks, ", ".join(names) or "-", *others))
        columns = list(zip(*rows, strict=True))[len(self.nodes) == 1 :]
        padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
        return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def engine_name(pool: str, idx: int) -> str:
    return f"{pool}-{idx}"


def engine_idx(name: str) -> int:
    return int(name.rpartition("-")[2])


def follower_name(pool: str, idx: int, number: int) -> str:
    """The name of an engine's follower's actor; `number` counts from 1."""
    return f"{engine_name(pool, idx)}.{number}"


def plan_placement(nodes: Sequence[Node], pools: Sequence[PoolRequest]) -> Plan:
    """Places all ranks and engines of a job.

    Pools that name their GPUs get them first. The other pools share the rest: pools with a
    number of engines come first, the largest engines first; then each of the others gets one
    engine, and the one that was named first takes what is left. Colocated pools come last, on
    their host's GPUs.

    An engine that needs more GPUs than any node has gets the next free whole nodes of one size.

    An engine gets the first GPUs that are enough for it, and is never moved. On nodes of different
    sizes a job may therefore have no plan although another order would place it.

    Raises:
        ConfigError: a rank or an engine has no place.
    """
    for node in nodes:
        if node.num_ranks > len(node.gpus):
            raise ConfigError(
                f"{node.num_ranks} ranks are on a node with {_number_of(node.gpus)}, and every "
                "rank needs a GPU of its own: start fewer ranks (--nproc-per-node), or set "
                "train.device = 'cpu'"
            )
    ranked = [list(range(node.num_ranks)) for node in nodes]
    free = [list(range(node.num_ranks, len(node.gpus))) for node in nodes]
    takes_rest = next((pool.name for pool in pools if _fills(pool, ranked)), "")
    taken_by: list[str] = []
    engines: dict[str, tuple[Assignment, ...]] = {}

    def order(pool: PoolRequest) -> tuple[bool, bool, bool, bool, int]:
        is_last, is_auto = pool.name == takes_rest, pool.count is None
        return pool.mode == "colocated", not pool.gpus, is_last, is_auto, -pool.num_gpus

    for pool in sorted(pools, key=order):
        _check_nodes(pool, len(nodes))
        if _spans_nodes(pool, nodes):
            _check_spanning(pool, nodes)
        count = pool.count
        if pool.gpus:
            _check_by_hand(pool, nodes)
            usable = _Usable([list(pool.gpus) for _ in nodes], "those in gpus")
        elif pool.mode == "colocated":
            host = _gpus_of(engines[pool.shares_with], len(nodes))
            usable = _Usable(host, f"the GPUs of pool {pool.shares_with!r}")
        elif _is_on_ranks(pool, ranked):
            usable = _Usable(ranked, "the ranks' GPUs")
        else:
            usable = _Usable(free, _description_of_free(ranked, taken_by))
            if _fills(pool, ranked) and pool.name != takes_rest:
                count = 1
        usable = _on_nodes_of(pool, usable)
        if _spans_nodes(pool, nodes):
            places = _spanning_places(pool, usable, nodes)
        else:
            places = _places(pool, usable)
        count = max(1, len(places)) if count is None else count
        if count > len(places):
            raise ConfigError(_no_place(pool, count, len(places), usable, nodes))
        engines[pool.name] = places[:count]
        if pool.mode == "colocated":
            _check_host_is_on_one_node(pool, engines[pool.shares_with])
            _check_on_host(pool, places[:count], engines[pool.shares_with])
        elif pool.num_gpus:
            taken = _gpus_of(places[:count], len(nodes))
            left = [
                [gpu for gpu in gpus if gpu not in gone]
                for gpus, gone in zip(free, taken, strict=True)
            ]
            if left != free:
                taken_by.append(pool.name)
            free = left
    ranks = [Assignment(node=idx, gpus=(gpu,)) for idx, gpus in enumerate(ranked) for gpu in gpus]
    return Plan(
        nodes=tuple(nodes),
        ranks=tuple(ranks),
        engines={pool.name: engines[pool.name] for pool in pools},
        num_gpus={pool.name: pool.num_gpus for pool in pools},
    )


class _Usable(NamedTuple):
    """GPUs by node that a pool's engines may get, and their description."""

    gpus: Sequence[Sequence[int]]
    what: str


def _on_nodes_of(pool: PoolRequest, usable: _Usable) -> _Usable:
    if not pool.nodes:
        return usable
    gpus = [there if idx in pool.nodes else () for idx, there in enumerate(usable.gpus)]
    return _Usable(gpus, f"{usable.what} on nodes {list(pool.nodes)}")


def _is_on_ranks(pool: PoolRequest, ranked: Sequence[Sequence[int]]) -> bool:
    return pool.mode == "hybrid" and any(ranked)


def _fills(pool: PoolRequest, ranked: Sequence[Sequence[int]]) -> bool:
    own = pool.gpus or pool.mode == "colocated" or _is_on_ranks(pool, ranked)
    return pool.count is None and pool.num_gpus > 0 and not own


def _description_of_free(ranked: Sequence[Sequence[int]], taken_by: Sequence[str]) -> str:
    takers = ["the ranks"] if any(ranked) else []
    takers += [f"pool {name!r}" for name in taken_by]
    return f"the GPUs left by {' and '.join(takers)}" if takers else "all GPUs"


def _places(pool: PoolRequest, usable: _Usable) -> tuple[Assignment, ...]:
    size = pool.num_gpus
    if size == 0:
        nodes = pool.nodes or range(len(usable.gpus))
        count = len(nodes) if pool.count is None else pool.count
        return tuple(Assignment(node=nodes[idx % len(nodes)], gpus=()) for idx in range(count))
    return tuple(
        Assignment(node=idx, gpus=tuple(gpus[first : first + size]))
        for idx, gpus in enumerate(usable.gpus)
        for first in range(0, len(gpus) - size + 1, size)
    )


def _spans_nodes(pool: PoolRequest, nodes: Sequence[Node]) -> bool:
    sizes = [len(nodes[idx].gpus) for idx in pool.nodes or range(len(nodes))]
    return len(sizes) > 1 and pool.num_gpus > max(sizes)


def _check_spanning(pool: PoolRequest, nodes: Sequence[Node]) -> None:
    """Raises ConfigError if no set of whole nodes makes an engine, or the settings forbid it."""
    what = f"pool {pool.name!r}: its engines need {pool.num_gpus} GPUs, more than a node has"
    sizes = sorted({len(nodes[idx].gpus) for idx in pool.nodes or range(len(nodes))} - {0})
    if pool.gpus:
        raise ConfigError(
            f"{what}, so each takes all GPUs of several nodes: remove gpus; nodes chooses the nodes"
        )
    if pool.mode == "colocated":
        raise ConfigError(
            f"{what}, and engines on several nodes are not time-sliced with others: set mode to "
            "'standalone'"
        )
    if not any(pool.num_gpus % size == 0 for size in sizes):
        raise ConfigError(
            f"{what}, and are no multiple of the {' or '.join(map(str, sizes))} that one has: an "
            "engine takes all GPUs of each of its nodes, so choose another tensor-parallel size"
        )


def _spanning_places(
    pool: PoolRequest, usable: _Usable, nodes: Sequence[Node]
) -> tuple[Assignment, ...]:
    """Where the pool's engines fit if each takes several whole nodes of one size: the next ones."""
    places: list[Assignment] = []
    waiting: dict[int, list[Assignment]] = {}  # by the size of a node
    for idx, (gpus, node) in enumerate(zip(usable.gpus, nodes, strict=True)):
        size = len(node.gpus)
        if not size or len(gpus) < size or pool.num_gpus % size:
            continue
        parts = waiting.setdefault(size, [])
        parts.append(Assignment(node=idx, gpus=tuple(gpus)))
        if len(parts) * size == pool.num_gpus:
            places.append(replace(parts[0], followers=tuple(parts[1:])))
            parts.clear()
    return tuple(sorted(places, key=lambda place: place.node))


def _no_place(
    pool: PoolRequest, count: int, num_places: int, usable: _Usable, nodes: Sequence[Node]
) -> str:
    is_colocated = pool.mode == "colocated"
    num_ranks = sum(node.num_ranks for node in nodes)
    largest = max(len(node.gpus) for node in nodes)
    largest_shared = max(map(len, usable.gpus)) if is_colocated else largest
    remedies = {
        "lower count": pool.count is not None and num_places > 0,
        "lower the tensor-parallel size": pool.num_gpus > 1,
        "name more nodes in nodes": 0 < len(pool.nodes) < len(nodes),
        "name more GPUs in gpus": bool(pool.gpus),
        "start more ranks (--nproc-per-node)": pool.mode == "hybrid"
        and not pool.gpus
        and 0 < num_ranks < sum(len(node.gpus) for node in nodes),
        "start fewer ranks (job.trainer_gpus_per_node)": pool.mode == "standalone"
        and not pool.gpus
        and num_ranks > 1
        and pool.num_gpus < largest,
        "set mode to 'standalone'": is_colocated and pool.num_gpus <= largest,
        "set gpus to share GPUs by hand": not pool.gpus and pool.num_gpus <= largest_shared,
    }
    possible = ", or ".join(remedy for remedy, helps in remedies.items() if helps)
    sizes = " + ".join(str(len(gpus)) for gpus in usable.gpus)
    return (
        f"pool {pool.name!r}: its engines need {count} x {pool.num_gpus} GPUs, and {usable.what} "
        f"are {sizes} in number, enough for {num_places}: {possible}"
    )


def _check_nodes(pool: PoolRequest, num_nodes: int) -> None:
    """Raises ConfigError if the job lacks one of the nodes, or one is named twice."""
    if pool.nodes and (last := max(pool.nodes)) >= num_nodes:
        raise ConfigError(
            f"pool {pool.name!r}: nodes has {last}, and the job has "
            f"{'1 node' if num_nodes == 1 else f'{num_nodes} nodes'}: use numbers from 0, which "
            "is the node of rank 0"
        )
    if len(set(pool.nodes)) < len(pool.nodes):
        raise ConfigError(
            f"pool {pool.name!r}: nodes names a node twice in {list(pool.nodes)}: name each once, "
            "and set count to have more engines"
        )


def _check_by_hand(pool: PoolRequest, nodes: Sequence[Node]) -> None:
    """Raises ConfigError if a node lacks one of the GPUs, or they are not whole engines."""
    if pool.num_gpus == 0:
        raise ConfigError(
            f"pool {pool.name!r}: gpus is set, and its engines are on the CPU: remove gpus, or "
            "set device = 'cuda'"
        )
    for idx in pool.nodes or range(len(nodes)):
        node = nodes[idx]
        if (last := max(pool.gpus)) >= len(node.gpus):
            raise ConfigError(
                f"pool {pool.name!r}: gpus has {last}, and a node has {_number_of(node.gpus)}: "
                "use numbers from 0, in the order of CUDA_VISIBLE_DEVICES"
            )
    if len(pool.gpus) % pool.num_gpus:
        raise ConfigError(
            f"pool {pool.name!r}: gpus names {len(pool.gpus)}, and its engines have "
            f"{pool.num_gpus} GPUs each: name {pool.num_gpus} for each engine"
        )
    for first in range(0, len(pool.gpus), pool.num_gpus):
        own = pool.gpus[first : first + pool.num_gpus]
        if len(set(own)) < len(own):
            raise ConfigError(
                f"pool {pool.name!r}: gpus gives one engine the GPUs {list(own)}: name different "
                f"ones, {pool.num_gpus} for each engine"
            )


def _check_host_is_on_one_node(pool: PoolRequest, host: Sequence[Assignment]) -> None:
    if any(place.followers for place in host):
        raise ConfigError(
            f"pool {pool.name!r}: mode is 'colocated', and the engines of pool "
            f"{pool.shares_with!r} are on several nodes each, where they are not time-sliced with "
            "others: set mode to 'standalone'"
        )


def _check_on_host(
    pool: PoolRequest, places: Sequence[Assignment], host: Sequence[Assignment]
) -> None:
    """Raises ConfigError if a colocated engine has a GPU that its host's engines lack."""
    allowed = {(place.node, gpu) for place in host for gpu in place.gpus}
    for place in places:
        others = [gpu for gpu in place.gpus if (place.node, gpu) not in allowed]
        if others:
            raise ConfigError(
                f"pool {pool.name!r}: gpus has {others[0]}, and the engines of pool "
                f"{pool.shares_with!r}, whose GPUs a colocated pool shares, are on "
                f"{sorted({gpu for _, gpu in allowed})}: name some of these, or set mode to "
                "'standalone'"
            )


def _number_of(gpus: Sequence[str]) -> str:
    return "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def _gpus_of(places: Sequence[Assignment], num_nodes: int) -> list[list[int]]:
    return [
        list(
            dict.fromkeys(
                gpu
                for place in places
                for part in place.parts
                if part.node == idx
                for gpu in part.gpus
            )
        )
        for idx in range(num_nodes)
    ]


def _span(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}-{last}"
