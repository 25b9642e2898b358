"""A training job whose processes are all killed at random moments, and which resumes each time.

    job = KilledJob(folder, SMALL, rng=random.Random(seed))
    job.run_through(plan_kills(2, steps=12, rng=rng))
    history = job.history()

`python tests/faults/kill_quickstart.py` does this to the quickstart.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from held_places import HeldPlaces
from trained_history import History, read_lines, surviving_history
from whole_runs import START_LIMIT_S, Ended, Run, start_run

from umbra.trainer.reporting.metrics_loggers import read_metrics

Moment = Literal["start", "step", "checkpoint"]
_MOMENTS: Final[tuple[Moment, ...]] = ("checkpoint", "step", "step", "checkpoint", "start")
_LAST_SHARE: Final = 0.8
"""Share of the steps in which kills are planned: a later kill might find the job done."""
_SAVE_S: Final = 0.04
"""Duration of a checkpoint of a small model, about."""
_STEP_S: Final = 0.3  # before the first step is done
_POLL_S: Final = 0.001
_RUN_LIMIT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """The moment of a kill.

    Attributes:
        moment: "start": before the first batch, estimated from the previous incarnation; "step": at
            any point of a step; "checkpoint": while one is written.
        after_step: the job must have the batch of this step first.
        share: in [0, 1), of the start, the step or the save.
    """

    moment: Moment
    after_step: int
    share: float


def plan_kills(num_kills: int, steps: int, rng: random.Random) -> list[PlannedKill]:
    """Plans kills, in the order in which they will be done."""
    moments: list[Moment] = [_MOMENTS[idx % len(_MOMENTS)] for idx in range(num_kills)]
    rng.shuffle(moments)
    last = max(1, int(steps * _LAST_SHARE))
    after = sorted(rng.randrange(last) for _ in moments)
    return [
        PlannedKill(moment, step, rng.random()) for moment, step in zip(moments, after, strict=True)
    ]


class KilledJob:
    """All incarnations of a job in `folder`, which has a config.toml. A context manager.

    Args:
        is_forked: see `start_run`.

    Attributes:
        num_kills: kills so far.
        num_torn: kills that left an incomplete checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        *,
        rng: random.Random,
        num_ranks: int = 2,
        is_forked: bool = True,
    ) -> None:
        self.run_dir = folder / "run"
        self.num_kills = 0
        self.num_torn = 0
        self._folder = folder
        self._settings = settings
        self._rng = rng
        self._num_ranks = num_ranks
        self._records = folder / "records"
        self._held = HeldPlaces(folder / "held")
        self._incarnation = 0
        self._is_forked = is_forked
        self._start_s = 2.0 if is_forked else 8.0  # of the previous incarnation
        self._socket_root = Path(tempfile.mkdtemp(prefix="umbra-f-", dir="/tmp"))

    def __enter__(self) -> Self:
        self._records.mkdir()
        return self

    def __exit__(self, *exc_info: object) -> None:
        shutil.rmtree(self._socket_root, ignore_errors=True)

    @contextlib.contextmanager
    def begin(self, *settings: str, num_ranks: int | None = None) -> Generator[Run]:
        """Starts another incarnation from the newest checkpoint; it sweeps dead ones' sockets."""
        self._incarnation += 1
        with start_run(
            self._folder,
            *self._settings,
            "run.resume=auto",
            *settings,
            num_ranks=self._num_ranks if num_ranks is None else num_ranks,
            environ={
                "RECORDED_IN": str(self._records),
                "RECORDED_INCARNATION": str(self._incarnation),
                "HELD_IN": str(self._folder / "held"),
            },
            program="recorded_trainer",
            socket_root=self._socket_root,
            is_forked=self._is_forked,
        ) as run:
            try:
                yield run
            finally:
                saved = self._folder / f"output-{self._incarnation}.txt"
                shutil.copy(self._folder / "output.txt", saved)

    def run_through(self, kills: Sequence[PlannedKill]) -> Ended:
        """Runs one incarnation for each kill, and a last one to the end of the training."""
        for kill in kills:
            with self.begin() as run:
                self.kill(run, kill)
        with self.begin() as run:
            return self.finish(run)

    def finish(self, run: Run) -> Ended:
        ended = run.wait(_RUN_LIMIT_S)
        assert ended.status == 0, ended.output
        return ended

    def kill(self, run: Run, kill: PlannedKill) -> None:
        """Waits for the moment, then kills every process of the job."""
        match kill.moment:
            case "start":
                time.sleep(kill.share * self._start_s)
            case "step":
                self.wait_for_batch(run, kill.after_step)
                time.sleep(kill.share * 1.5 * self.step_s())
            case "checkpoint":
                self.wait_for_batch(run, kill.after_step)
                self._wait_for_save(run)
                time.sleep(kill.share * _SAVE_S)
        run.kill_all(self._rng)
        self.num_kills += 1
        self.num_torn += bool(self._unfinished_saves(run))

    def kill_in_save(self, run: Run, place: str, last_batch: int) -> None:
        """Kills every process while a checkpoint is held at a place of `recorded_trainer`, once the
        job has the batch of this step."""
        self._held.hold(place)
        reached = self._held.is_reached
        run.wait_for(f"{place!r}", lambda: reached(place) or None, _RUN_LIMIT_S)
        self.wait_for_batch(run, last_batch)
        run.kill_all(self._rng)
        self._held.release(place)
        self.num_kills += 1

    def stop_in_save(self, run: Run, place: str) -> Ended:
        """Sends SIGTERM while a checkpoint is held at a place of `recorded_trainer`, for good."""
        self._held.hold(place)
        reached = self._held.is_reached
        run.wait_for(f"{place!r}", lambda: reached(place) or None, _RUN_LIMIT_S)
        os.kill(run.process.pid, signal.SIGTERM)
        return run.wait(_RUN_LIMIT_S)

    def resumed_from(self) -> int:
        """The step of the checkpoint that this incarnation began with."""
        lines = read_lines(self._records / f"{self._incarnation:03}-0.jsonl")
        return next(int(line["began"]) for line in lines if "began" in line)

    def last_batch(self) -> int:
        """The step whose batch rank 0 got last in this incarnation; -1 before the first."""
        lines = read_lines(self._records / f"{self._incarnation:03}-0.jsonl")
        return max((int(line["step"]) for line in lines if "step" in line), default=-1)

    def wait_for_batch(self, run: Run, step: int) -> None:
        """Waits until rank 0 has the batch of this step or of a later one."""
        run.wait_for("its first batch", lambda: self.last_batch() >= 0 or None, START_LIMIT_S)
        self._start_s = time.time() - run.started_s
        what = f"the batch of step {step}"
        run.wait_for(what, lambda: self.last_batch() >= step or None, _RUN_LIMIT_S)

    def step_s(self) -> float:
        """Duration of a step, by the median: a step in which something restarted is far longer."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        return statistics.median([row.get("time/step_s", _STEP_S) for row in rows] or [_STEP_S])

    def history(self) -> History:
        return surviving_history(self._records)

    def _wait_for_save(self, run: Run) -> None:
        run.wait_for(
            "a checkpoint",
            lambda: self._unfinished_saves(run) or None,
            _RUN_LIMIT_S,
            every_s=_POLL_S,
        )

    def _unfinished_saves(self, run: Run) -> list[str]:
        """Checkpoints that this run has begun and not completed."""
        found: list[str] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.run_dir / "checkpoints"):
                is_new = entry.stat().st_mtime >= run.started_s
                if is_new and not (Path(entry.path) / "COMPLETE").exists():
                    found.append(entry.name)
        return found
