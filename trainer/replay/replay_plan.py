"""The steps of a replay and their checks, before torch is loaded."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from umbra.runtime.dash.sample_texts import open_ledger
from umbra.runtime.engine_api.weight_files import local_model
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.trainer.checkpoint.run_dir import RunDir
from umbra.trainer.checkpoint.trainer_state import (
    checkpoint_step,
    complete_checkpoints,
    read_trainer_state,
)
from umbra.trainer.config.config_file import Override, check_config
from umbra.trainer.config.trainer_config import RunSection, TrainerConfig

_REFUSED: Final[Mapping[str, Sequence[str]]] = {
    "it changes the rollouts, and a replay trains on those of the run: leave it out, or start a "
    "run with it": ("data", "rollout", "reward", "pool", "pools", "model.path", "train.seed"),
    "a replay evaluates nothing: leave it out, and evaluate its checkpoint with umbra eval": (
        "eval",
        "train.eval_every",
        "train.eval_at_start",
        "train.keep_best_by",
    ),
    "it has no effect on a replay: leave it out": (
        "run",
        "job",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.export",
        "train.offload",
        "train.shutdown_grace_s",
        "train.max_logprob_difference",
    ),
}
"""Sections and settings that a replay may not change, by the reason."""
_IN_CHECKPOINTS: Final = ("train.optimizer", "train.ema", "model.lora", "critic.path")
"""Settings that decide which tensors a checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Steps of a run to be trained again, `first` to `last`, counted from 1.

    Attributes:
        config: the run's, with `overrides`, and `run.dir` for the replay's own directory.
        start: the checkpoint after step `first - 1`; None for the starting model.
        num_ranks: of the run, when it trained these steps.
    """

    run_dir: Path
    first: int
    last: int
    overrides: Sequence[str]
    config: TrainerConfig
    start: Path | None
    num_ranks: int

    @property
    def is_exact(self) -> bool:
        """Whether the replay has to compute what the run has computed."""
        return not self.overrides

    @classmethod
    def read(
        cls, run_dir: Path, steps: tuple[int, int], overrides: Sequence[str], out: Path | None
    ) -> Self:
        """Raises ConfigError if the run cannot be replayed like this; LedgerError if its ledger is
        damaged."""
        first, last = steps
        run_dir = run_dir.absolute()
        out = (out or Path(f"{run_dir.name}-replay-{first}-{last}")).absolute()
        if out.exists():
            raise ConfigError(f"{out} exists: remove it, or name another directory with -o")
        for given in overrides:
            _check_override(Override.parse(given), first)
        config = recorded_config(run_dir, overrides)
        name = f"{config.run_name}, steps {first} to {last} again"
        config = replace(config, run=RunSection(dir=out, name=" ".join([name, *overrides])))
        index = open_ledger(run_dir)
        kept = _check_steps(index, first, last, config)
        checkpoints = _checkpoints(run_dir, index)
        if not checkpoints:
            raise ConfigError(
                f"{run_dir} has no complete checkpoint, so that the number of its ranks is "
                "unknown: replay a run that has saved one"
            )
        later = [path for path in checkpoints if checkpoint_step(path) >= first]
        return cls(
            run_dir=run_dir,
            first=first,
            last=last,
            overrides=overrides,
            config=config,
            start=_start(checkpoints, first, kept),
            num_ranks=read_trainer_state([*later, checkpoints[-1]][0]).world_size,
        )


def recorded_config(run_dir: Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """The settings of a run's last start, with paths as they are from here. Raises ConfigError if
    it has recorded none, or `overrides` do not fit them."""
    place = run_dir / "settings.json"
    try:
        recorded: Mapping[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        settings, folder = dict(recorded["settings"]), Path(recorded["folder"])
        settings["train"] |= {"epochs": None}  # `steps` has the number of steps that they took
        given = {each.key: each.text for each in map(Override.parse, overrides)}
        if "gae" not in given.get("train.advantage", "gae"):
            settings.pop("critic", None)  # which nothing would train
        reward = settings["reward"]
        for section in (settings["model"], settings.get("critic", {})):
            if path := section.get("path"):
                section["path"] = local_model(str(folder / path), with_weights=True)
        reward["python_path"] = [str(folder / each) for each in (*reward["python_path"], "")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{place} does not have the settings of a run ({cause}): give the folder that a "
            "training run's config calls run.dir"
        ) from error
    return check_config(TrainerConfig, settings, str(place), overrides)


def _check_override(override: Override, first: int) -> None:
    for reason, names in _REFUSED.items():
        if override.keys[0] in names or ".".join(override.keys[:2]) in names:
            raise ConfigError(f"{override.shown} (command line): {reason}")
    if first > 1 and override.key.startswith(_IN_CHECKPOINTS):
        raise ConfigError(
            f"{override.shown} (command line): the checkpoint before step {first} is of the run's "
            "own: leave it out, or replay from step 1"
        )


def _check_steps(index: LedgerIndex, first: int, last: int, config: TrainerConfig) -> range:
    """The steps whose samples the ledger has, with `first` and `last` among them."""
    begun, done = [*index.steps(), 0][0] + 1, index.table.steps_done
    if not begun <= first <= last <= done:
        have = f"steps {begun} to {done}" if done >= begun else "no step"
        raise ConfigError(f"--steps {first}:{last}: the run has trained {have}")

    def is_kept(step: int) -> bool:
        return all(index.keeps(row) for row in index.of_step(step - 1))

    steps = range(begun, done + 1)  # the oldest are removed first
    kept = steps[bisect_left(steps, True, key=is_kept) :]
    if first not in kept:
        since = f"from step {kept[0]} on" if kept else "of no step"
        raise ConfigError(
            f"--steps {first}:{last}: the ledger has only samples {since}, because "
            f"rollout.ledger_gb = {config.rollout.ledger_gb:g} keeps the newest: replay later "
            "steps, and give the next run a larger rollout.ledger_gb"
        )
    return kept


def _checkpoints(run_dir: Path, index: LedgerIndex) -> list[Path]:
    """The run's complete checkpoints. A run that resumed from an older one than its newest has kept
    the newer ones: these do not count. Their last step was trained on older weights than the step
    of that number that counts."""
    return [
        path
        for path in complete_checkpoints(RunDir(run_dir).checkpoints)
        if read_trainer_state(path).version >= index.table.newest_version(checkpoint_step(path) - 1)
    ]


def _start(checkpoints: Sequence[Path], first: int, kept: range) -> Path | None:
    found = {checkpoint_step(path): path for path in checkpoints}
    if first == 1:
        return None
    if first - 1 not in found:
        steps = ", ".join(map(str, found))
        begins = [step for step in kept if step == 1 or step - 1 in found]
        possible = " or ".join(f"--steps {step}:{kept[-1]}" for step in begins)
        raise ConfigError(
            f"--steps {first}: a replay from step {first} needs the checkpoint after step "
            f"{first - 1}, and the run has those after steps {steps}: replay "
            f"{possible or 'another run'}; train.checkpoint_every and "
            "train.keep_checkpoints decide which the next run has"
        )
    return found[first - 1]
