"""Decides how large KV caches are, and whether a job's processes fit their GPUs' memory. Pure.

    phase        ranks                                hybrid    colocated  standalone
    start        parameters                           awake     asleep     awake
    sync         parameters, optimizer                weights   asleep     awake
    generation   what train.offload leaves there      awake     asleep     awake
    colocated    the larger of these and the start's  asleep    awake      awake
    train        all of it, gradients, activations    asleep    asleep     awake

An engine that is awake has its weights, its KV cache and what it needs besides; of one that is
asleep a rest stays. Nothing is known of pools whose sizes are not given: they count as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from umbra.runtime.cluster.placement import Plan, PoolMode, engine_name
from umbra.runtime.errors import ConfigError

Phase = Literal["start", "sync", "generation", "colocated", "train"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

GIB: Final = 1 << 30
_RESERVE: Final = 0.04
# Share of a GPU that KV caches leave free, for the driver and for allocators, which round up.
_AWAKE: Final[Mapping[PoolMode, tuple[Phase, ...]]] = {
    "hybrid": ("start", "generation"),
    "colocated": ("colocated",),
    "standalone": PHASES,
}
_Cell = tuple[int, int]
"""A GPU: the indices of its node and of itself in the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeed:
    """What one rank takes of its GPU, in bytes.

    Attributes:
        start_nbytes: parameters and the CUDA context.
        sync_nbytes: the same with the optimizer's state.
        generation_nbytes: what is left of it while engines generate.
        training_nbytes: the same as for a sync, with gradients.
        activations_nbytes: an estimate of what training takes besides, at most.
    """

    start_nbytes: int
    sync_nbytes: int
    generation_nbytes: int
    training_nbytes: int
    activations_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """What one engine of a pool takes of each of its GPUs, in bytes.

    Attributes:
        mode: of the pool.
        kv_token_nbytes: of one token in the KV cache.
        overhead_nbytes: CUDA context, graphs and buffers, while it is awake.
        asleep_nbytes: all that stays while it sleeps.
        kv_num_tokens: size of the KV cache, if the user set it.
        least_kv_num_tokens, most_kv_num_tokens: otherwise the bounds of what the plan gives it.
    """

    mode: PoolMode
    weights_nbytes: int
    kv_token_nbytes: int
    overhead_nbytes: int
    asleep_nbytes: int
    kv_num_tokens: int | None
    least_kv_num_tokens: int
    most_kv_num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Which memory the processes are expected to take.

    Attributes:
        kv_num_tokens: of an engine of each pool whose needs are known.
        expected_nbytes: by phase, node and GPU; only GPUs of a rank or of a known pool, and only
            phases that the job has.
        warnings: for the user, about phases that may not fit.
    """

    kv_num_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    expected_nbytes: Mapping[Phase, Mapping[tuple[int, int], int]] = field(
        default_factory=dict[Phase, Mapping[tuple[int, int], int]]
    )
    warnings: tuple[str, ...] = ()

    def columns(
        self, seen_nbytes: Mapping[Phase, Mapping[tuple[int, int], int]] = {}
    ) -> dict[str, dict[tuple[int, int], str]]:
        """Columns for `Plan.table`: expected memory by phase, and what was seen of it, in GiB."""
        columns: dict[str, dict[_Cell, str]] = {}
        for phase, by_gpu in self.expected_nbytes.items():
            seen = seen_nbytes.get(phase, {})
            columns[phase] = {
                cell: f"{nbytes / GIB:.1f}" + (f" ({seen[cell] / GIB:.1f})" if cell in seen else "")
                for cell, nbytes in by_gpu.items()
            }
        return columns


def plan_memory(
    plan: Plan,
    gpu_nbytes: Sequence[Sequence[int]],
    rank: RankNeed | None,
    engines: Mapping[str, EngineNeed],
) -> MemoryPlan:
    """Sizes the KV caches and checks each phase of each GPU.

    What is free on a GPU is shared equally by the engines on it that are awake at the same time and
    have no size set. All engines of a pool get the size that the fullest GPU allows.

    Args:
        gpu_nbytes: memory of the GPUs, by node.
        rank: the need of each rank; None without ranks.
        engines: the needs of an engine, by pool; pools that are not named count as nothing.

    Raises:
        ConfigError: a phase does not fit a GPU, activations apart.
    """
    tenants = _Tenants(plan, rank, engines)
    sizes = {name: need.kv_num_tokens for name, need in engines.items()}
    free = {
        (phase, cell): gpu_nbytes[cell[0]][cell[1]] * (1 - _RESERVE)
        - sum(nbytes for _, nbytes in tenants.fixed(phase, cell, sizes))
        for phase in tenants.phases
        for cell in tenants.cells
    }
    chosen = dict(sizes)
    for name, need in engines.items():
        if need.kv_num_tokens is None:
            shares = [
                free[phase, cell] / sum(sizes[other] is None for other in awake)
                for phase, cell, awake in tenants.awake()
                if name in awake
            ]
            num_tokens = int(min(shares) / need.kv_token_nbytes)
            chosen[name] = max(need.least_kv_num_tokens, min(num_tokens, need.most_kv_num_tokens))
    expected: dict[Phase, dict[_Cell, int]] = {}
    warnings: list[str] = []
    for phase in tenants.phases:
        for cell in tenants.cells:
            parts = tenants.fixed(phase, cell, chosen)
            total, limit = sum(nbytes for _, nbytes in parts), gpu_nbytes[cell[0]][cell[1]]
            if total > limit:
                raise ConfigError(_does_not_fit(phase, cell, parts, limit, len(plan.nodes)))
            if rank is not None and phase == "train" and cell in tenants.ranks:
                parts = [*parts, ("activations, at most,", rank.activations_nbytes)]
                total += rank.activations_nbytes
                if total > limit and not warnings:
                    warnings.append(_may_not_fit(cell, parts, limit, len(plan.nodes)))
            expected.setdefault(phase, {})[cell] = total
    return MemoryPlan(
        kv_num_tokens={name: size for name, size in chosen.items() if size is not None},
        expected_nbytes=expected,
        warnings=tuple(warnings),
    )


class _Tenants:
    """Who takes memory of which GPU in which phase."""

    def __init__(
        self,
        plan: Plan,
        rank: RankNeed | None,
        engines: Mapping[str, EngineNeed],
    ) -> None:
        self._rank = rank
        self._needs = engines
        self.ranks = {(place.node, gpu) for place in plan.ranks for gpu in place.gpus}
        self._engines: dict[_Cell, list[tuple[str, str]]] = {}
        for pool, places in plan.engines.items():
            if pool in engines:
                for idx, place in enumerate(places):
                    for gpu in place.gpus:
                        cell = (place.node, gpu)
                        self._engines.setdefault(cell, []).append((pool, engine_name(pool, idx)))
        self.cells = sorted(self.ranks | self._engines.keys())
        has_colocated = any(need.mode == "colocated" for need in engines.values())
        self.phases: list[Phase] = [
            phase
            for phase in PHASES
            if (
                has_colocated if phase == "colocated" else phase == "generation" or rank is not None
            )
        ]

    def fixed(
        self, phase: Phase, cell: _Cell, kv_num_tokens: Mapping[str, int | None]
    ) -> list[tuple[str, int]]:
        """Bytes by process, activations and KV caches without a size apart."""
        parts: list[tuple[str, int]] = []
        if self._rank is not None and cell in self.ranks:
            of_rank = {
                "start": self._rank.start_nbytes,
                "sync": self._rank.sync_nbytes,
                "generation": self._rank.generation_nbytes,
                # Colocated engines are awake as they start, too: before the others, beside ranks.
                "colocated": max(self._rank.start_nbytes, self._rank.generation_nbytes),
                "train": self._rank.training_nbytes,
            }
            parts.append(("the rank", of_rank[phase]))
        for pool, name in self._engines.get(cell, []):
            need = self._needs[pool]
            if phase in _AWAKE[need.mode]:
                parts.append((name, need.weights_nbytes + need.overhead_nbytes))
                cache = (kv_num_tokens[pool] or 0) * need.kv_token_nbytes
                parts.append((f"its KV cache of {kv_num_tokens[pool]} tokens", cache))
            elif phase == "sync" and need.mode == "hybrid":
                parts.append((f"{name}'s weights", need.weights_nbytes + need.overhead_nbytes))
            else:
                parts.append((f"{name} asleep", need.asleep_nbytes))
        return parts

    def awake(self) -> Iterator[tuple[Phase, _Cell, list[str]]]:
        """The pools of all engines that are awake together, once for each of their engines."""
        for phase in self.phases:
            for cell in self.cells:
                pools = [pool for pool, _ in self._engines.get(cell, [])]
                yield phase, cell, [p for p in pools if phase in _AWAKE[self._needs[p].mode]]


def _does_not_fit(
    phase: Phase, cell: _Cell, parts: Iterable[tuple[str, int]], limit: int, num_nodes: int
) -> str:
    remedies = "train on more GPUs, or give the engines GPUs of their own (mode = 'standalone')"
    if phase in ("start", "generation", "colocated"):
        remedies = (
            "lower kv_cache_num_tokens or max_context_len, or give each engine more GPUs (tensor "
            "parallelism) or GPUs of its own (mode = 'standalone')"
        )
        remedies += ", or set train.offload" * (phase != "start")
    return f"{_gpu(cell, limit, num_nodes)}, and {phase} needs {_sum(parts)}: {remedies}"


def _may_not_fit(cell: _Cell, parts: Iterable[tuple[str, int]], limit: int, num_nodes: int) -> str:
    return (
        f"{_gpu(cell, limit, num_nodes)}, and training may need {_sum(parts)}. If it runs out of "
        "memory, lower train.max_tokens_per_micro_batch, or set train.activation_checkpointing = "
        "'full'"
    )


def _sum(parts: Iterable[tuple[str, int]]) -> str:
    listed = [(name, nbytes / GIB) for name, nbytes in parts if nbytes]
    total = sum(gib for _, gib in listed)
    return f"{total:.1f} GiB ({', '.join(f'{name} {gib:.1f}' for name, gib in listed)})"


def _gpu(cell: _Cell, limit: int, num_nodes: int) -> str:
    node = f" of node {cell[0]}" if num_nodes > 1 else ""
    return f"GPU {cell[1]}{node} has {limit / GIB:.1f} GiB"
