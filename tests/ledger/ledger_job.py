"""A small training job on a ledger, to be killed: `ledger_job.py FOLDER NUM_STEPS SEED`.

Its "model" is the dictionary of what it was trained on, uid -> step; that is what its checkpoints
hold, in FOLDER/checkpoint.json. It says each step on stdout.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
from ledger_samples import admitted, runs_of

from umbra.runtime.rollout.ledger.ledger_events import (
    Checkpoint,
    Cut,
    Dropped,
    Event,
    Finished,
    Leased,
    Restored,
    Scored,
    Started,
    Version,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_replay import replay
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter, Ticket
from umbra.runtime.rollout.ledger.sample_accounts import GroupAccount, SampleState

LENGTH = 12
GROUPS_PER_STEP = 2
CHECKPOINT_EVERY = 3


def token_of(uid: int, position: int) -> int:
    return uid * 1000 + position


class Job:
    """One incarnation of the job."""

    def __init__(self, folder: Path, state: LedgerState, writer: LedgerWriter, seed: int) -> None:
        self.folder = folder
        self.state = state
        self.writer = writer
        self.rng = random.Random(seed)
        self.step, self.version = 0, 0
        self.trained: dict[int, int] = {}

    def do(self, *events: Event) -> Ticket:
        for event in events:
            self.state.apply(event)
        return self.writer.append(*events)

    def begin(self) -> None:
        if not self.state.versions:
            self.do(Version(0, 0))
            return
        path = self.folder / "checkpoint.json"
        if path.exists():
            saved = json.loads(path.read_text())
            self.step, self.version = saved["step"], saved["version"]
            self.trained = {int(uid): step for uid, step in saved["trained"].items()}
        restored = Restored(self.step, self.version, self.rng.random() < 0.3)
        self.do(Cut(self.state.running(), "the manager died"), restored)
        self.version = max(self.state.versions) + 1
        self.do(Version(self.version, self.step))

    async def run_step(self) -> None:
        while len(ready := self.scored_groups()) < GROUPS_PER_STEP:
            self.advance_one()
            await asyncio.sleep(0)
        uids = [
            sample.uid
            for group in ready[:GROUPS_PER_STEP]
            for sample in group.samples
            if sample.state is SampleState.SCORED
        ]
        await self.writer.durable(self.do(Leased(self.step, uids_of(*uids))), 30.0)
        for uid in uids:
            assert uid not in self.trained, uid
            self.trained[uid] = self.step
        self.step += 1
        self.version += 1
        self.do(Version(self.version, self.step))
        if self.step % CHECKPOINT_EVERY == 0:
            self.save()

    def scored_groups(self) -> list[GroupAccount]:
        return [
            group
            for group in self.state.groups()
            if {str(sample.state) for sample in group.samples} - {"dropped"} == {"scored"}
        ]

    def advance_one(self) -> None:
        """Something happens to the oldest sample that is not scored, else a group is admitted."""
        for group in self.state.groups():
            for sample in group.samples:
                if self.rng.random() < 0.01 and sample.state is SampleState.PARTIAL:
                    self.do(Dropped(uids_of(sample.uid), "unlucky"))
                    return
                match sample.state:
                    case SampleState.PENDING | SampleState.PARTIAL:
                        self.do(Started(uids_of(sample.uid)))
                    case SampleState.RUNNING if sample.num_tokens == LENGTH:
                        self.do(Finished(uids_of(sample.uid), ["length"]))
                    case SampleState.RUNNING if self.rng.random() < 0.2:
                        self.do(Cut(uids_of(sample.uid), "sync"))
                    case SampleState.RUNNING:
                        start = sample.num_tokens
                        length = min(LENGTH - start, self.rng.randint(1, 4))
                        run = [token_of(sample.uid, start + i) for i in range(length)]
                        self.do(runs_of((sample.uid, start, self.version, run)))
                    case SampleState.FINISHED:
                        self.do(Scored(uids_of(sample.uid), np.ones(1)))
                    case _:
                        continue
                return
        first_uid = self.state.next_uid
        self.do(admitted(first_uid, f"p{first_uid}", 3))

    def save(self) -> None:
        scratch = self.folder / "checkpoint.new"
        content = {"step": self.step, "version": self.version, "trained": self.trained}
        scratch.write_text(json.dumps(content))
        os.replace(scratch, self.folder / "checkpoint.json")
        self.do(Checkpoint(self.step, self.version))


async def run(folder: Path, num_steps: int, seed: int) -> None:
    saved = folder / "checkpoint.json"
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0
    log = LedgerLog.open(folder / "ledger" / "m", f"job-{seed}", part_nbytes=20_000)
    state = replay(log.history.entries, restoring_step=step)
    async with LedgerWriter(log, flush_s=0.01) as writer:
        job = Job(folder, state, writer, seed)
        job.begin()
        while job.step < num_steps:
            await job.run_step()
            print(job.step, flush=True)
        job.save()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
