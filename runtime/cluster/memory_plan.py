"""Sizes KV caches, and checks that a job's processes fit their GPUs' memory. Pure.

    phase        ranks                                  hybrid    colocated  standalone
    sync         parameters, optimizer                  weights   asleep     awake
    generation   what train.offload leaves there        awake     asleep     awake
    colocated    what train.offload leaves there        asleep    awake      awake, hosts asleep
    train        all of it, gradients, activations      asleep    asleep     awake

An engine that is awake has its weights, its KV cache and an overhead; one that sleeps keeps a part
of the overhead. Parts that hybrid engines keep in training (`EngineNeed.sleeps`) are there in a
sync, too. Pools without given needs count as nothing. Ranks whose engines never sleep keep the
memory of training in all phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from umbra.runtime.cluster.placement import Plan, PoolMode, engine_name
from umbra.runtime.engine_api.lifecycle import ALL_TAGS, Tag
from umbra.runtime.errors import ConfigError

Phase = Literal["sync", "generation", "colocated", "train"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

GIB: Final = 1 << 30
_RESERVE: Final = 0.04
# Share of a GPU that KV caches leave free, for the driver and for allocators, which round up.
_RESERVE_AWAKE: Final = 0.1
# The same beside a training step with engines awake. Measured runs took up to a tenth more than
# their plans: a smaller share lets runs stay awake that must then fall back.
_FOREIGN_CONTEXT_NBYTES: Final = 640 << 20
# An engine that read weights on another GPU had a CUDA context there, of 610 MiB on an H100. To be
# measured again: it opens the memory for its own GPU now.
_Cell = tuple[int, int]
"""A GPU: the indices of its node and of itself in the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeed:
    """A rank's memory on its GPU: in a sync (parameters, optimizer state, CUDA context), the part
    that stays during generation, in training with gradients, and estimated activations. The context
    is a part of the first three. Logits may be kept beside activations, to be computed once. With
    `keeps_cache`, torch's allocator keeps the memory of training."""

    context_nbytes: int
    sync_nbytes: int
    generation_nbytes: int
    training_nbytes: int
    activations_nbytes: int
    keeps_cache: bool
    logits_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """An engine's memory on each of its GPUs, in bytes.

    Attributes:
        shares_with: name of the pool that a colocated one is time-sliced with.
        is_updated: whether it reads weights from the ranks.
        weights_nbytes: of its parameters, twice if updates are staged.
        overhead_nbytes: CUDA context, graphs and buffers, while it is awake.
        asleep_nbytes: the part of the overhead that stays while it sleeps.
        kv_num_tokens: size of the KV cache, if the user set it; else the plan's within bounds.
        sleeps: what a hybrid engine frees while the ranks train.
    """

    mode: PoolMode
    shares_with: str
    is_updated: bool
    weights_nbytes: int
    kv_token_nbytes: int
    overhead_nbytes: int
    asleep_nbytes: int
    kv_num_tokens: int | None
    least_kv_num_tokens: int
    most_kv_num_tokens: int
    sleeps: frozenset[Tag] = ALL_TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The expected memory by phase, node and GPU, where needs are known, and KV caches by pool.
    `activations_fit` is the forecast for training; `notes` are sentences for the user.
    `training_nbytes` is the most that a rank takes from torch's allocator; `logits_nbytes` of them
    are for kept logits. `shared_nbytes` is the most with the engines that are on its GPU then."""

    kv_num_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    expected_nbytes: Mapping[Phase, Mapping[tuple[int, int], int]] = field(
        default_factory=dict[Phase, Mapping[tuple[int, int], int]]
    )
    activations_fit: bool = True
    notes: tuple[str, ...] = ()
    training_nbytes: int = 0
    logits_nbytes: int = 0
    shared_nbytes: int = 0

    @property
    def gpus(self) -> list[int]:
        cells = {cell for by_gpu in self.expected_nbytes.values() for cell in by_gpu}
        return sorted(gpu for node, gpu in cells if node == 0)

    def columns(
        self, seen_nbytes: Mapping[Phase, Mapping[tuple[int, int], int]] = {}
    ) -> dict[str, dict[tuple[int, int], str]]:
        """Columns for `Plan.table`: expected memory by phase, and in brackets what was seen."""
        columns: dict[str, dict[_Cell, str]] = {}
        for phase, by_gpu in self.expected_nbytes.items():
            seen = seen_nbytes.get(phase, {})
            columns[f"{phase} GiB"] = {
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

    Free memory of a GPU is shared equally by the engines on it that are awake together and have
    no size set. All engines of a pool get the size that the fullest GPU allows. Caches never get
    the memory that `train.offload` frees, because ranks that resume hold it while engines start.
    Pools missing in `engines` count as nothing. Logits are kept where that changes nothing else.
    Raises ConfigError if a phase does not fit, activations apart.
    """
    if rank is not None and rank.logits_nbytes:
        lean = replace(rank, logits_nbytes=0)
        memory = plan_memory(plan, gpu_nbytes, lean, engines)
        activations_nbytes = rank.activations_nbytes + rank.logits_nbytes
        full = replace(lean, activations_nbytes=activations_nbytes)
        found = plan_memory(plan, gpu_nbytes, full, engines)
        has_room = all(
            found.expected_nbytes["train"][place.node, gpu]
            <= gpu_nbytes[place.node][gpu] * (1 - _RESERVE_AWAKE)
            for place in plan.ranks
            for gpu in place.gpus
        )
        if has_room and found.activations_fit and found.kv_num_tokens == memory.kv_num_tokens:
            kept = f"ranks keep {rank.logits_nbytes / GIB:.1f} GiB of logits for a backward pass"
            notes = (*found.notes, kept)
            return replace(found, notes=notes, logits_nbytes=rank.logits_nbytes)
        return memory
    sizes = _kv_sizes(plan, gpu_nbytes, rank, engines)
    tenants = _Tenants(plan, rank, engines)
    expected: dict[Phase, dict[_Cell, int]] = {}
    notes = [
        f"an engine of pool {pool} has a KV cache of {size} tokens" for pool, size in sizes.items()
    ]
    activations_fit = True
    for phase in tenants.phases:
        for cell in tenants.cells:
            parts = tenants.parts(phase, cell, sizes)
            total, limit = sum(parts.values()), gpu_nbytes[cell[0]][cell[1]]
            where = _gpu(cell, limit, len(plan.nodes))
            if total > limit:
                remedies = tenants.remedies(phase, cell)
                raise ConfigError(f"{where}, and {phase} needs {_sum(parts)}: {remedies}")
            if rank and cell in tenants.ranks and (phase == "train" or rank.keeps_cache):
                parts["activations, at most,"] = rank.activations_nbytes
                total = sum(parts.values())
                reserve = _RESERVE_AWAKE if tenants.trains_awake(phase, cell) else 0
                if total > limit * (1 - reserve) and activations_fit:
                    activations_fit = False
                    notes.append(
                        f"{where}, and training may need {_sum(parts)}. If it runs out of memory, "
                        "lower train.max_tokens_per_micro_batch, and let "
                        "train.activation_checkpointing be 'auto' or 'full'"
                        + (", and pool.sleep 'auto' or 'all'" if reserve else "")
                    )
            expected.setdefault(phase, {})[cell] = total
    training_nbytes = shared_nbytes = 0
    if rank is not None:
        training_nbytes = rank.training_nbytes + rank.activations_nbytes - rank.context_nbytes
        shared_nbytes = max(expected["train"][cell] for cell in tenants.ranks) - rank.context_nbytes
    return MemoryPlan(
        kv_num_tokens=sizes,
        expected_nbytes=expected,
        activations_fit=activations_fit,
        notes=tuple(notes),
        training_nbytes=training_nbytes,
        shared_nbytes=shared_nbytes,
    )


def _kv_sizes(
    plan: Plan,
    gpu_nbytes: Sequence[Sequence[int]],
    rank: RankNeed | None,
    engines: Mapping[str, EngineNeed],
) -> dict[str, int]:
    if rank is not None:
        rank = replace(
            rank,
            generation_nbytes=rank.sync_nbytes,
            training_nbytes=rank.training_nbytes + rank.activations_nbytes,
        )
    tenants = _Tenants(plan, rank, engines)
    given = {name: need.kv_num_tokens or 0 for name, need in engines.items()}
    shares: dict[str, list[float]] = {}
    for phase in tenants.phases:
        for cell in tenants.cells:
            reserve = _RESERVE_AWAKE if tenants.trains_awake(phase, cell) else _RESERVE
            usable = gpu_nbytes[cell[0]][cell[1]] * (1 - reserve)
            free = usable - sum(tenants.parts(phase, cell, given).values())
            sized = [pool for pool in tenants.caching(phase, cell) if not given[pool]]
            for pool in sized:
                shares.setdefault(pool, []).append(free / len(sized))
    sizes: dict[str, int] = {}
    for pool, need in engines.items():
        sizes[pool] = given[pool]
        if pool in shares:
            num_tokens = int(min(shares[pool]) / need.kv_token_nbytes)
            sizes[pool] = max(need.least_kv_num_tokens, min(num_tokens, need.most_kv_num_tokens))
    return sizes


class _Tenants:
    def __init__(
        self,
        plan: Plan,
        rank: RankNeed | None,
        engines: Mapping[str, EngineNeed],
    ) -> None:
        self._rank = rank
        self._needs = engines
        self._hosts = {need.shares_with for need in engines.values()} - {""}
        self.ranks = {(place.node, gpu) for place in plan.ranks for gpu in place.gpus}
        self._engines: dict[_Cell, list[tuple[str, str]]] = {}
        self._num_readers = [0] * len(plan.nodes)
        for pool in engines:
            for idx, place in enumerate(plan.engines[pool]):
                for part in place.parts:
                    self._num_readers[part.node] += engines[pool].is_updated
                    for gpu in part.gpus:
                        on_gpu = self._engines.setdefault((part.node, gpu), [])
                        on_gpu.append((pool, engine_name(pool, idx)))
        self.cells = sorted(self.ranks | self._engines.keys())
        is_there: dict[Phase, bool] = {
            "sync": rank is not None,
            "generation": True,
            "colocated": bool(self._hosts),
            "train": rank is not None,
        }
        self.phases: list[Phase] = [phase for phase in PHASES if is_there[phase]]

    def caching(self, phase: Phase, cell: _Cell) -> list[str]:
        """The pools that have KV caches there."""
        pools = [pool for pool, _ in self._engines.get(cell, [])]
        return [pool for pool in pools if "kv_cache" in self._awake(pool, phase)]

    def trains_awake(self, phase: Phase, cell: _Cell) -> bool:
        pools = [pool for pool, _ in self._engines.get(cell, [])]
        hybrid = [pool for pool in pools if self._needs[pool].mode == "hybrid"]
        return phase == "train" and any(self._awake(pool, phase) for pool in hybrid)

    def _awake(self, pool: str, phase: Phase) -> frozenset[Tag]:
        need = self._needs[pool]
        if phase == "colocated":
            is_free = need.mode == "standalone" and pool not in self._hosts
            return ALL_TAGS if is_free or need.mode == "colocated" else frozenset()
        if need.mode == "hybrid" and phase != "generation":
            loaded = frozenset[Tag]({"weights"} if phase == "sync" else ())
            return ALL_TAGS - need.sleeps | loaded
        return frozenset() if need.mode == "colocated" else ALL_TAGS

    def parts(self, phase: Phase, cell: _Cell, kv_num_tokens: Mapping[str, int]) -> dict[str, int]:
        parts: dict[str, int] = {}
        engines = self._engines.get(cell, [])
        if self._rank is not None and cell in self.ranks:
            of_rank: dict[Phase, int] = {
                "sync": self._rank.sync_nbytes,
                "generation": self._rank.generation_nbytes,
                "colocated": self._rank.generation_nbytes,
                "train": self._rank.training_nbytes,
            }
            parts["the rank"] = of_rank["train" if self._rank.keeps_cache else phase]
            num_own = sum(self._needs[pool].is_updated for pool, _ in engines)
            num_foreign = self._num_readers[cell[0]] - num_own
            parts["contexts of other GPUs' engines"] = num_foreign * _FOREIGN_CONTEXT_NBYTES
        for pool, name in engines:
            need = self._needs[pool]
            awake = self._awake(pool, phase)
            if not awake:
                parts[f"{name} asleep"] = need.asleep_nbytes
                continue
            parts[name] = need.overhead_nbytes + need.weights_nbytes * ("weights" in awake)
            if "kv_cache" in awake:
                cache = f"{name}'s KV cache of {kv_num_tokens[pool]} tokens"
                parts[cache] = kv_num_tokens[pool] * need.kv_token_nbytes
        return parts

    def remedies(self, phase: Phase, cell: _Cell) -> str:
        pools, has_rank = self.caching(phase, cell), cell in self.ranks
        is_set = any(self._needs[pool].kv_num_tokens for pool in pools)
        remedies = {
            "lower kv_cache_num_tokens": is_set,
            "lower max_context_len": bool(pools) and not is_set,
            "give each engine more GPUs (tensor parallelism)": bool(pools),
            "let pool.sleep be 'auto'": self.trains_awake("train", cell),
            "give the engines GPUs without ranks": has_rank and cell in self._engines,
            "train on more GPUs": has_rank,
        }
        return ", or ".join(remedy for remedy, helps in remedies.items() if helps)


def _sum(parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in parts.items() if nbytes)
    return f"{sum(parts.values()) / GIB:.1f} GiB ({listed})"


def _gpu(cell: _Cell, limit: int, num_nodes: int) -> str:
    node = f" of node {cell[0]}" if num_nodes > 1 else ""
    return f"GPU {cell[1]}{node} has {limit / GIB:.1f} GiB"
