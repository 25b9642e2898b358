"""How a pool of engines is started, and which settings go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.restart_policy import RestartPolicy
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.time_slicing import SlicingRules
from umbra.runtime.weights.transport_choice import TRANSPORT_SETTINGS, TransportSetting

_KNOWN_MODES: Final = ("hybrid", "standalone", "colocated")
_KNOWN_ON_UPDATE: Final = ("abort", "keep", "drain")


def update_waves_problem(update_waves: int, mode: str, count: int) -> str:
    """What is wrong with the setting, and what to change; "" where nothing is."""
    if update_waves == 1:
        return ""
    if mode != "standalone":
        return (
            f"update_waves {update_waves} is for mode 'standalone': {mode} engines generate "
            "nothing when they are updated; set update_waves to 1, or mode to 'standalone'"
        )
    if not 1 <= update_waves <= count:
        return (
            f"update_waves {update_waves} is not possible with {count} engines: use 1 to {count}, "
            "or raise count"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """How to start a pool.

    Attributes:
        engine: `module:Class` of the engine actor.
        count: number of engines on this node.
        mode: hybrid engines take turns with the trainer (sleep and wake); standalone ones do not;
            colocated ones take turns with the engines of `shares_with`, see `time_slicing`.
        kwargs: for the engine's constructor.
        shares_with: name of the pool on whose GPUs a colocated one is.
        max_wait_s, max_turn_s: of a colocated pool, see `SlicingRules`.
        on_update: what a sync does to running generation: abort (resumed under the new weights),
            keep (frozen, goes on) or drain (finished first).
        update_waves: 1 updates all engines at once; more updates one part of them after the other,
            while the others generate. For standalone engines, at most one wave for each.
        load_weights: engines read their weights themselves and serve from the start, as version 0;
            the pool takes part in no sync. Engines are told by an argument of the same name.
        bucket_nbytes: size of each of the four buffers that weights travel in, see SyncSettings.
        transport: how weights travel: auto, memfd or cuda_ipc; `transport_choice`.
    """

    name: str
    engine: str
    count: int
    mode: str = "hybrid"
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 300.0
    hung_limit_s: float = 15.0
    busy_limit_s: float = 300.0
    stall_limit_s: float = 100.0
    grace_s: float = 3.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    memory_limit_nbytes: int = 0
    on_update: str = "abort"
    update_waves: int = 1
    load_weights: bool = False
    bucket_nbytes: int = 2 << 20
    transport: TransportSetting = "auto"
    shares_with: str = ""
    max_wait_s: float | None = None
    max_turn_s: float = 60.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"pool {self.name!r} has count {self.count}: use 1 or more")
        if self.on_update not in _KNOWN_ON_UPDATE:
            raise ConfigError(f"on_update {self.on_update!r}: use {', '.join(_KNOWN_ON_UPDATE)}")
        if self.transport not in TRANSPORT_SETTINGS:
            raise ConfigError(f"transport {self.transport!r}: use {', '.join(TRANSPORT_SETTINGS)}")
        if self.mode not in _KNOWN_MODES:
            raise ConfigError(f"pool mode {self.mode!r}: use {', '.join(_KNOWN_MODES)}")
        if (self.mode == "colocated") != bool(self.shares_with):
            raise ConfigError(
                f"pool {self.name!r}: mode 'colocated' and shares_with, the pool it takes turns "
                "with, go together: give both or neither"
            )
        if self.mode == "colocated" and not self.load_weights:
            raise ConfigError(
                f"pool {self.name!r}: a colocated pool gets no weights by a sync: set load_weights"
            )
        problem = update_waves_problem(self.update_waves, self.mode, self.count)
        if problem:
            raise ConfigError(f"pool {self.name!r}: {problem}")

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        fields = dict(data)
        fields["restart"] = RestartPolicy(**fields.get("restart", {}))
        return cls(**fields)

    @property
    def turn_rules(self) -> SlicingRules:
        return SlicingRules(max_wait_s=self.max_wait_s, max_turn_s=self.max_turn_s)

    def engine_specs(self) -> list[ActorSpec]:
        """One actor per engine, named POOL-0, POOL-1, ..."""
        own_weights = {"load_weights": True} if self.load_weights else {}
        return [
            ActorSpec(
                name=f"{self.name}-{idx}",
                target=self.engine,
                kwargs={**self.kwargs, **own_weights},
                restart=self.restart,
                start_timeout_s=self.start_timeout_s,
                hung_limit_s=self.hung_limit_s,
                busy_limit_s=self.busy_limit_s,
                stall_limit_s=self.stall_limit_s,
                grace_s=self.grace_s,
                env=self.env,
                memory_limit_nbytes=self.memory_limit_nbytes,
                role="engine",
            )
            for idx in range(self.count)
        ]
