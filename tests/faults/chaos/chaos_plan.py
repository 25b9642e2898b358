"""The plan of a chaos run and its faults, which follow from the seed before the run starts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from umbra.runtime.engine_api.pool_settings import OnUpdate
from umbra.runtime.errors import ConfigError

POOL: Final = "policy"
MANAGER: Final = "rollouts"
WORKERS: Final = ("rewards-0", "rewards-1")

VOCAB_SIZE: Final = 64
STOP_TOKEN: Final = 1
"""One in `VOCAB_SIZE` tokens: completions have 64 tokens in the mean, and a long tail."""
MAX_NEW_TOKENS: Final = 256
MAX_CONTEXT_LEN: Final = 288

HUNG_LIMIT_S: Final = 2.0
"""From SIGSTOP to the replacement. Longer makes a run longer; shorter mistakes processes of a busy
machine for stopped ones."""
_PAUSES_S: Final = (0.1, 0.6 * HUNG_LIMIT_S)
"""How long a process is stopped before SIGCONT; too short for it to be replaced."""

FaultKind = Literal["kill", "stop", "pause"]
Role = Literal["engine", "manager", "worker"]
_KINDS: Final[Sequence[FaultKind]] = ("kill", "stop", "kill", "pause")
_ROLES: Final[Sequence[Role]] = (
    "manager",
    "engine",
    "worker",
    "engine",
    "engine",
    "engine",
    "engine",
)
"""Both are repeated side by side. Their lengths have no common divisor, so all pairs occur."""
Phase = Literal["generation", "training", "update"]
TRAINING_S: Final = 0.3
"""Time between a batch and the update after it. With less, faults come too late; more makes a run
longer."""
_STEP_PHASES: Final[Sequence[tuple[Phase, float, tuple[float, float]]]] = (
    ("update", 0.25, (0.0, 0.02)),
    ("training", 0.15, (0.0, 0.2)),
)
"""Share of faults in each phase, and their delay in seconds from its beginning. A fault takes a bit
longer than its delay."""
_ANY_SHARE: Final = 0.2
"""Share of the other faults that may hit a process that starts, or an engine without weights."""
_LATEST: Final = 0.97
"""Share of the run: later faults would find no trajectories to disturb."""

INJECTED: Final[Sequence[Mapping[str, Any]]] = (
    {"kind": "repeat", "every_tokens": 6_000},
    {"kind": "repeat", "what": "earlier", "every_tokens": 6_000},
    {"kind": "drop", "what": "run", "every_tokens": 5_000},
    {"kind": "error", "call": "submit", "every_tokens": 20_000},
    {"kind": "error", "call": "deltas", "every_tokens": 60_000},
    {"kind": "error", "call": "load", "every_tokens": 60_000},
)
"""Faults that engines inject by themselves (engine `faulty`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A signal to a random process of a role.

    Attributes:
        kind: kill is SIGKILL, stop is SIGSTOP for good, pause is SIGSTOP and later SIGCONT.
        phase: while the ranks wait for a batch, train on it, or publish the weights after it.
        after_finished: in generation, the number of finished trajectories at which it comes.
        step: of the training or update in which it comes, `delay_s` after its beginning.
        lasts_s: duration of a pause.
        hits_any: whether it may hit a process that is starting or waiting for weights.
    """

    kind: FaultKind
    role: Role = "engine"
    phase: Phase = "generation"
    after_finished: int = 0
    step: int = 0
    delay_s: float = 0.0
    lasts_s: float = 0.0
    hits_any: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """Sizes of a run. Batch s is trained on after s optimizer steps.

    Attributes:
        num_updates: weight updates after the first weights: one after each batch.
        groups_per_batch, group_size: of each batch.
        on_update: what a weight update does to running generation.
    """

    seed: int
    num_updates: int
    groups_per_batch: int
    group_size: int
    num_faults: int
    on_update: OnUpdate = "abort"
    num_engines: int = 4
    num_ranks: int = 2
    max_staleness: int = 2

    @classmethod
    def of_size(
        cls, *, seed: int, trajectories: int, kills: int, updates: int, group_size: int, **rest: Any
    ) -> Self:
        """Raises ConfigError if the trajectories do not make whole groups and batches."""
        unit = updates * group_size
        if min(trajectories, updates, group_size) < 1 or trajectories % unit:
            raise ConfigError(
                f"{trajectories} trajectories: give a multiple of updates x group_size = {unit}"
            )
        if min(seed, kills) < 0:
            raise ConfigError(f"seed {seed} and {kills} kills must not be negative")
        return cls(
            seed=seed,
            num_updates=updates,
            groups_per_batch=trajectories // unit,
            group_size=group_size,
            num_faults=kills,
            **rest,
        )

    @property
    def num_trajectories(self) -> int:
        return self.num_updates * self.groups_per_batch * self.group_size

    @property
    def num_prompts(self) -> int:
        """Few enough for a run to use each prompt several times."""
        return max(1, self.num_updates * self.groups_per_batch // 4)

    @property
    def engines(self) -> list[str]:
        return [f"{POOL}-{idx}" for idx in range(self.num_engines)]

    @property
    def victims(self) -> dict[str, Role]:
        """The roles of all processes that may be hit, by name."""
        roles: dict[str, Role] = {MANAGER: "manager"}
        for name in self.engines:
            roles[name] = "engine"
        for name in WORKERS:
            roles[name] = "worker"
        return roles

    def versions(self) -> list[int]:
        """The version after each number of optimizer steps; some are skipped, as by rollbacks."""
        rng = self.rng("versions")
        versions = [rng.randrange(3)]
        while len(versions) <= self.num_updates:
            versions.append(versions[-1] + rng.randint(1, 3))
        return versions

    def faults(self) -> list[Fault]:
        """The faults in updates, then those in trainings, then the others in order."""
        rng = self.rng("faults")
        hits: list[tuple[FaultKind, Role]] = [
            (_KINDS[idx % len(_KINDS)], _ROLES[idx % len(_ROLES)]) for idx in range(self.num_faults)
        ]
        rng.shuffle(hits)
        todo = iter(hits)
        faults: list[Fault] = []
        for phase, share, delays_s in _STEP_PHASES:
            faults += [
                Fault(
                    kind=kind,
                    role=role,
                    phase=phase,
                    step=rng.randrange(self.num_updates),
                    delay_s=rng.uniform(*delays_s),
                    lasts_s=rng.uniform(*_PAUSES_S),
                )
                for kind, role in itertools.islice(todo, round(share * self.num_faults))
            ]
        latest = int(_LATEST * self.num_trajectories)
        rest = list(todo)
        points = sorted(rng.randrange(latest) for _ in rest)
        return faults + [
            Fault(
                kind=kind,
                role=role,
                after_finished=point,
                lasts_s=rng.uniform(*_PAUSES_S),
                hits_any=rng.random() < _ANY_SHARE,
            )
            for (kind, role), point in zip(rest, points, strict=True)
        ]

    def rng(self, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{what}")
