"""Chaos: rollouts while their processes are killed and stopped, and an account of every token.

An asynchronous pool of four engine processes generates trajectories in groups, and gets new weights
after every batch. Meanwhile SIGKILL and SIGSTOP hit engines, the rollout manager and rollout
workers at random points, some of them in a weight update, and engines drop, repeat and refuse
things by themselves. Neither the batches nor the ledger may lose, repeat or tear anything. Each
token must be the right one, made by the weights of its version (see `chaos_oracle`), and no older
than the staleness bound.

    python tests/faults/chaos/chaos.py [--seed N] [--trajectories 10000] [--kills 100]
        [--updates 20]

The exit status is 1 if anything is wrong, and stderr has the problems. RUN_DIR/summary.json has the
results.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[2] / "shared"))  # run_traces is there
sys.path.append(str(Path(__file__).parents[2] / "shared/ledger"))  # ledger_replay is there
sys.path.append(str(Path(__file__).parents[2] / "shared/rollout"))  # saved_tokenizer is there
sys.path.append(str(Path(__file__).parents[2] / "shared/runtime"))  # session_rank is there

from chaos_account import Account
from chaos_oracle import Oracle
from chaos_plan import TRAINING_S, ChaosPlan
from chaos_saboteur import DeathNotes, Saboteur
from chaos_world import ChaosWorld, injected_faults
from run_traces import RunTraces

from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session

_GRACE_S: Final = 5.0
"""Time from the end of the session to the end of all its processes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all checks passed, 1 if not, 2 for sizes that do not fit."""
    arguments = _parser().parse_args(argv)
    # Raises, so that the processes are ended, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        plan = ChaosPlan.of_size(
            seed=arguments.seed,
            trajectories=arguments.trajectories,
            kills=arguments.kills,
            updates=arguments.updates,
            group_size=arguments.group_size,
            on_update=arguments.on_update,
        )
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    print(f"chaos: seed {plan.seed}", flush=True)
    run = ChaosRun(plan, arguments.run_dir)
    with RunTraces() as traces:
        os.environ.update(traces.environment)
        try:
            run.run()
        except UmbraError as error:
            run.problems.append(f"the run failed: {error}")
        except KeyboardInterrupt:
            print("chaos: interrupted", file=sys.stderr)
            return 130
        run.problems += [f"left behind: {left}" for left in traces.find(_GRACE_S)]
    return run.report()


class ChaosRun:
    """One run in a directory.

    Attributes:
        problems: the failed checks.
    """

    def __init__(self, plan: ChaosPlan, run_dir: Path) -> None:
        self.problems: list[str] = []
        self._plan = plan
        self._run_dir = run_dir
        self._oracle = Oracle(plan)
        self._account = Account(plan, self._oracle)
        self._deaths = DeathNotes()
        self._num_updates = 0
        self._began = time.monotonic()
        self._seen: dict[str, Any] = {}

    def run(self) -> None:
        """Runs the plan. Raises UmbraError if the run cannot continue."""
        plan, run_dir = self._plan, self._run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        for stale in (*run_dir.glob("logs/*.log"), run_dir / "summary.json"):
            stale.unlink(missing_ok=True)
        shutil.rmtree(run_dir / "ledger", ignore_errors=True)
        config = SessionConfig(run_dir=run_dir)
        with Session.from_torchrun(config, on_note=self._deaths.observe) as session:
            world = ChaosWorld(session, plan, self._oracle, run_dir)
            world.publish(self._oracle.versions[0], 0)
            saboteur = Saboteur(
                session, plan.victims, plan.faults(), plan.rng("victims"), world.num_finished
            )
            try:
                with saboteur:
                    self._train(world, saboteur)
                world.settle(self._deaths, saboteur.fatal_labels())
                self._account.observe_ledger(world.ledger())
                self._seen["counters"] = world.stats()["counters"]
                self._seen["dropped_groups"] = world.stats()["training"]["groups_dropped"]
            finally:
                self._record(world, saboteur)

    def _train(self, world: ChaosWorld, saboteur: Saboteur) -> None:
        for step, version in enumerate(self._oracle.versions[1:]):
            batch = world.next_batch(step)
            with saboteur.during("training", step):
                self._account.observe(step, batch)
                time.sleep(TRAINING_S)
            with saboteur.during("update", step):
                world.publish(version, step + 1)
            self._num_updates += 1
            saboteur.check()
            print(
                f"chaos: batch {step + 1} of {self._plan.num_updates} after "
                f"{time.monotonic() - self._began:.0f} s: {self._account.num_trajectories} "
                f"trajectories, {len(saboteur.strikes)} faults, {len(self._deaths.how)} deaths",
                flush=True,
            )
        saboteur.finish()

    def _record(self, world: ChaosWorld, saboteur: Saboteur) -> None:
        """Records what happened, for the report."""
        self._seen |= saboteur.summary()
        self._seen["catch_up_syncs"] = world.num_catch_ups
        self._seen["interruptions"] = world.interruptions
        self._seen["injected"] = injected_faults(self._run_dir / "logs", self._plan.engines)
        crashes = self._deaths.crashes()
        self.problems += [f"a process ended by itself: {crash}" for crash in crashes]

    # -- the account ---------------------------------------------------------------------

    def report(self) -> int:
        """Prints the account and writes it; returns the exit status."""
        self._check_enough()
        summary = self._summary()
        path = self._run_dir / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        for name, value in summary.items():
            if name != "problems":
                print(f"chaos: {name} {value}")
        for problem in self.problems:
            print(f"chaos: {problem}", file=sys.stderr)
        verdict = "failed" if self.problems else "passed: every token accounted for"
        print(f"chaos: {verdict}, seed {self._plan.seed}; see {path}")
        return 1 if self.problems else 0

    def _check_enough(self) -> None:
        """Checks that enough happened: otherwise the run proves nothing."""
        self.problems += self._account.problems()
        for name, seen, wanted in (
            ("trajectories", self._account.num_trajectories, self._plan.num_trajectories),
            ("kills", self._seen.get("kills", 0), self._plan.num_faults),
            ("updates", self._num_updates, self._plan.num_updates),
        ):
            if seen < wanted:
                self.problems.append(f"only {seen} {name} happened, {wanted} were planned")
        if self._seen.get("dropped_groups"):
            self.problems.append(f"{self._seen['dropped_groups']} groups were dropped")

    def _summary(self) -> dict[str, Any]:
        account, ages = self._account, self._account.ages
        return {
            "seed": self._plan.seed,
            "passed": not self.problems,
            "trajectories": account.num_trajectories,
            "group_size": self._plan.group_size,
            "tokens": account.num_tokens,
            "updates": self._num_updates,
            "on_update": self._plan.on_update,
            **account.counts,
            "staleness_min": min(ages, default=None),
            "staleness_max": max(ages, default=None),
            "staleness_tokens": dict(sorted(ages.items())),
            "trajectories_of_several_versions": account.num_resumed,
            "deaths": len(self._deaths.how),
            "replaced_as_hung": self._deaths.num_hung,
            **self._seen,
            "wall_s": round(time.monotonic() - self._began, 1),
            "problems": self.problems,
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tests/faults/chaos/chaos.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILL and SIGSTOP (default 100)")
    parser.add_argument("--updates", type=int, default=20, help="one after each batch (default 20)")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--on-update", choices=("abort", "keep", "drain"), default="abort")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/chaos"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
