from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.cluster.placement import (
    EngineGpus,
    FollowerPlace,
    PoolMode,
    engine_name,
    follower_name,
)
from umbra.runtime.engine_api.engine_names import FOLLOWER_TARGET, EngineName, engine_target
from umbra.runtime.engine_api.lora import check_lora_rank
from umbra.runtime.engine_api.pool_settings import (
    OnUpdate,
    TransportSetting,
    allowed_transports,
    check_full_sync_every,
    check_staged_updates,
)
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.time_slicing import SlicingRules
from umbra.runtime.settings import Count, Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings(Settings):
    """Settings of a pool's syncs.

    Attributes:
        bucket_nbytes: the part of the image that a rank fills before engines load it. Larger ones
            leave engines waiting and the cache behind; smaller ones spend the time in wake-ups.
        verify_every: checksums are verified for the first version, for every n-th after it, and
            whenever an engine takes part for the first time. Every sync checks that all bytes were
            sent.
        full_sync_every: 1 always sends all weights between nodes. With n, only every n-th version
            does, and others send the changes since the last one; the version before a full one has
            checksums. Ranks then keep a copy of what they sent.
        on_update: what a sync does to running generation: keep (frozen, then continued), abort
            (resumed under the new weights, from its tokens) or drain (finished first).
        transport: how weights travel, see `Transport`.
        staged_updates: whether engines that read the ranks' memory first read it into spare memory,
            while they generate.
    """

    bucket_nbytes: int = 2 << 20
    verify_every: Positive = 16
    full_sync_every: Positive = 1
    on_update: OnUpdate = "keep"
    transport: TransportSetting = "auto"
    staged_updates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec(SyncSettings):
    """How to start a pool.

    Attributes:
        engine: short name of one of umbra's engines, or the `module:Class` of another.
        count: number of engines on the job's own nodes.
        num_gpus: of one engine; 0 on the CPU.
        mode: hybrid engines are time-sliced with the trainer (they sleep and wake); standalone ones
            are not; colocated ones are, with the engines of `shares_with`, see `time_slicing`.
        kwargs: for the engine's constructor.
        kwarg_settings: the setting that an argument comes from, see `ActorSpec`.
        engine_gpus: the GPUs of each engine. None, or on the CPU: the supervisor's
            CUDA_VISIBLE_DEVICES.
        engine_nodes: the node of each engine, by its index in the job. None: rank 0's.
        engine_followers: the followers of each engine on several nodes. None: no engine has any.
        shares_with: name of the pool on whose GPUs a colocated one is.
        max_wait_s, max_turn_s: of a colocated pool, see `SlicingRules`.
        load_weights: engines read their weights themselves and serve from the start, as version 0,
            without syncs; an argument of the same name.
        lora_rank: syncs bring LoRA adapters of at most this rank, and engines read the model's
            weights themselves; an argument of the same name. 0: syncs bring the weights.
    """

    name: str
    engine: EngineName
    count: Count
    num_gpus: Count = 0
    mode: PoolMode = "hybrid"
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kwarg_settings: Mapping[str, str] = field(default_factory=dict[str, str])
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 300.0
    hung_limit_s: float = 15.0
    busy_limit_s: float = 300.0
    stall_limit_s: float = 100.0
    grace_s: float = 3.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    engine_gpus: tuple[EngineGpus, ...] | None = None
    engine_nodes: tuple[int, ...] | None = None
    engine_followers: tuple[tuple[FollowerPlace, ...], ...] | None = None
    memory_limit_nbytes: int = 0
    load_weights: bool = False
    lora_rank: int = 0
    shares_with: str = ""
    max_wait_s: float | None = None
    max_turn_s: float = 60.0

    def __post_init__(self) -> None:
        try:
            Settings.__post_init__(self)
            check_full_sync_every(self.full_sync_every, self.transport)
            if self.staged_updates:
                check_staged_updates(self.mode, self.engine, self.transport)
            check_lora_rank(self.lora_rank, load_weights=self.load_weights)
        except ConfigError as error:
            raise ConfigError(f"pool {self.name!r}: {error}") from None
        for name in ("engine_gpus", "engine_nodes", "engine_followers"):
            places = getattr(self, name)
            if places is not None and len(places) != self.count:
                raise ConfigError(
                    f"pool {self.name!r}: {name} has {len(places)} entries for {self.count} "
                    "engines: give one for each, or None"
                )
        if (self.mode == "colocated") != bool(self.shares_with):
            raise ConfigError(
                f"pool {self.name!r}: mode 'colocated' and shares_with, the pool that it is "
                "time-sliced with, go together: give both or neither"
            )
        if self.mode == "colocated" and not self.load_weights:
            raise ConfigError(
                f"pool {self.name!r}: a colocated pool gets no weights by a sync: set load_weights"
            )

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.engine_nodes or (0,) * self.count

    @property
    def turn_rules(self) -> SlicingRules:
        return SlicingRules(max_wait_s=self.max_wait_s, max_turn_s=self.max_turn_s)

    def engine_specs(self) -> list[ActorSpec]:
        """One actor per engine, named POOL-0, POOL-1, ..."""
        gpus = self.engine_gpus or [None] * self.count
        return [self._engine_spec(idx, gpus[idx]) for idx in range(self.count)]

    def follower_specs(self, idx: int) -> list[tuple[ActorSpec, int]]:
        """The actor and the node of each follower of an engine; named POOL-0.1, POOL-0.2, ..."""
        by_engine = self.engine_followers or ()
        followers = by_engine[idx] if idx < len(by_engine) else ()
        return [
            (self._follower_spec(follower_name(self.name, idx, number), place.gpus), place.node)
            for number, place in enumerate(followers, start=1)
        ]

    def engine_specs_on(self, gpus: Sequence[str], *, first_idx: int) -> list[ActorSpec]:
        """Actors of further engines on a node that only generates, as many as its GPUs hold, or one
        on the CPU. Raises ConfigError if the pool cannot have engines there."""
        if not any(t.crosses_nodes for t in allowed_transports(self.transport)):
            raise ConfigError(
                f"pool {self.name!r}: its weights travel by {self.transport!r}, which reaches no "
                "other node: set pool.transport = 'auto'"
            )
        num_gpus = self.num_gpus
        if num_gpus == 0:
            on_cpu = None if self.engine_gpus is None else EngineGpus(own=())
            return [self._engine_spec(first_idx, on_cpu)]
        if len(gpus) < num_gpus:
            raise ConfigError(
                f"pool {self.name!r}: each of its engines needs {num_gpus} GPUs, and the node has "
                f"{len(gpus)}: set CUDA_VISIBLE_DEVICES there to more, or take another node"
            )
        parts = [tuple(gpus[at : at + num_gpus]) for at in range(0, len(gpus), num_gpus)]
        return [
            self._engine_spec(
                first_idx + idx,
                EngineGpus(own=own, others=tuple(gpu for gpu in gpus if gpu not in own)),
            )
            for idx, own in enumerate(parts)
            if len(own) == num_gpus
        ]

    def _engine_spec(self, idx: int, gpus: EngineGpus | None) -> ActorSpec:
        more: dict[str, Any] = {"load_weights": True} if self.load_weights else {}
        if self.lora_rank:
            more["lora_rank"] = self.lora_rank
        if followers := self.follower_specs(idx):
            more["followers"] = [spec.name for spec, _ in followers]
        kwargs = {**self.kwargs, **more}
        return self._actor_spec(
            engine_name(self.name, idx), engine_target(self.engine), kwargs, gpus
        )

    def _follower_spec(self, name: str, gpus: EngineGpus) -> ActorSpec:
        return self._actor_spec(name, FOLLOWER_TARGET, {}, gpus)

    def _actor_spec(
        self, name: str, target: str, kwargs: Mapping[str, Any], gpus: EngineGpus | None
    ) -> ActorSpec:
        return ActorSpec(
            name=name,
            target=target,
            kwargs=kwargs,
            kwarg_settings=self.kwarg_settings,
            restart=self.restart,
            start_timeout_s=self.start_timeout_s,
            hung_limit_s=self.hung_limit_s,
            busy_limit_s=self.busy_limit_s,
            stall_limit_s=self.stall_limit_s,
            grace_s=self.grace_s,
            env=self._environment(gpus),
            memory_limit_nbytes=self.memory_limit_nbytes,
            role="engine",
            gpus=None if gpus is None else gpus.own,
        )

    def _environment(self, gpus: EngineGpus | None) -> Mapping[str, str]:
        if gpus is None or not gpus.own:
            return self.env
        return {**self.env, "CUDA_VISIBLE_DEVICES": gpus.visible}
