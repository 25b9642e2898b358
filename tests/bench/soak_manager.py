"""The ledger's part of a rollout manager, which writes steps until it is killed.

`python tests/bench/soak_manager.py RUN_DIR SAMPLES TOKENS RUN_TOKENS CHECKPOINT_STEPS LAST_STEP
LEDGER_GB RESTORED PARENT_PID`. It kills itself in the middle of the step after LAST_STEP, when half
of its tokens are durable; with -1 it only recovers, and waits for its end. RESTORED is the
checkpoint to resume from, as this program printed it; "" restarts a killed manager. One line of
JSON when the state is recovered, and one after each step.

The recorder, the snapshots' processes, the recovery and the groups are the manager's own. Engines,
rewards and ranks are simulated, and tokens come from a table. Steps follow each other without
pauses, but wait for a snapshot that is due.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from umbra.runtime.errors import UmbraError
from umbra.runtime.process.child_process import process_nbytes
from umbra.runtime.process.descendants import child_pids
from umbra.runtime.process.prctl import die_with_parent
from umbra.runtime.rollout.dispatch.token_store import Runs
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger.ledger_events import Restored
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.group_recovery import recover_groups
from umbra.runtime.rollout.prompts import Prompt

NUM_PROMPTS: Final = 10_000
NUM_WORDS: Final = 16_384
_GROUP_SIZE: Final = 8
_NUM_KEPT: Final = 3  # checkpoints
_TABLE_LEN: Final = 2**18
_SEEDS: Final = range(_GROUP_SIZE)


class SoakManager:
    def __init__(self, recorder: Recorder, sizes: list[int]) -> None:
        self._recorder = recorder
        self._samples, self._tokens, self._run_tokens, self._checkpoint_steps, self._last_step = (
            sizes
        )
        self.writes = self._last_step >= 0
        self._step = 0
        self._next_idx = 0
        self._kept: list[int] = []
        chance = np.random.default_rng(0)
        # Logprobs that hardly compress, and tokens of which some are more frequent.
        self._table = (NUM_WORDS * chance.random(_TABLE_LEN) ** 3).astype(np.int32)
        self._logprobs = -chance.exponential(0.5, _TABLE_LEN).astype(np.float32)
        self._chance = chance

    async def recover(self, restored: Restored | None, position: str) -> int:
        """The number of groups that continue."""
        state = await self._recorder.recover(restored, position)
        assert state is not None
        recovered = recover_groups(state, make_group)
        await self._recorder.durable()
        self._step = state.steps_done
        self._next_idx = recovered.next_idx or 0
        # A killed manager's step is written from its beginning again.
        for group in [*recovered.open.values(), *recovered.ready.values()]:
            self._recorder.dropped(group, "the manager was killed")
        return sum(map(len, (recovered.open, recovered.ready, *recovered.leases.values())))

    async def write_step(self) -> None:
        recorder, groups = self._recorder, list[Group]()
        if not self._step:
            recorder.version(1, 0)
        for idx in range(self._next_idx, self._next_idx + self._samples // _GROUP_SIZE):
            groups.append(make_group(idx))
            recorder.admitted(groups[-1], idx // NUM_PROMPTS, idx)
        self._next_idx += len(groups)
        samples = [sample for group in groups for sample in group.trajectories]
        for sample in samples:
            recorder.started(sample)
        await self._generate(np.asarray([sample.uid for sample in samples], np.int64))
        for sample, reward in zip(samples, self._chance.random(len(samples)), strict=True):
            sample.finish("stop")
            recorder.finished(sample)
            sample.reward = float(reward)
        recorder.scored(samples)
        recorder.leased(self._step, groups)
        self._step += 1
        recorder.version(self._step + 1, self._step)
        await recorder.durable()
        checkpoint = None
        if self._step % self._checkpoint_steps == 0:
            self._kept = [*self._kept, self._step][-_NUM_KEPT:]
            checkpoint = [self._step, self._step + 1, recorder.position]
            recorder.checkpoint(self._step, self._step + 1, self._kept)
            await recorder.durable()
        write_line(
            step=self._step,
            cpu_s=time.process_time(),
            snapshots_cpu_s=sum(map(cpu_s, child_pids(os.getpid()))),
            resident_mb=process_nbytes(os.getpid()) / 1e6,
            checkpoint=checkpoint,
        )

    async def _generate(self, uids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        num = len(uids)
        versions = np.full(num, self._step + 1)
        for start in range(0, self._tokens, self._run_tokens):
            length = min(self._run_tokens, self._tokens - start)
            first = int(self._chance.integers(_TABLE_LEN))
            at = np.arange(first, first + num * length) % _TABLE_LEN
            offsets = np.arange(0, num * length + 1, length)
            tokens, logprobs = self._table[at], self._logprobs[at]
            starts = np.full(num, start)
            self._recorder.on_tokens(Runs(uids, starts, offsets, versions, tokens, logprobs))
            if self._step == self._last_step and start + length >= self._tokens / 2:
                await self._recorder.durable()
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(0)  # an engine's next batch of deltas
            if not self._recorder.has_capacity:
                resumed = asyncio.Event()
                self._recorder.on_capacity(resumed.set)
                await resumed.wait()


def make_group(order_idx: int) -> Group:
    epoch, idx = divmod(order_idx, NUM_PROMPTS)
    prompt = Prompt(f"prompt{idx}", "w1 w2", np.asarray([1, 2], np.int32), {})
    name = f"e{epoch}/prompt{idx}"
    return Group(
        name,
        [Trajectory(f"{name}/{k}", prompt, k, budget=2**20, max_context_len=2**20) for k in _SEEDS],
    )


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def write_line(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def fail(error: UmbraError) -> NoReturn:
    sys.exit(f"soak_manager: {error}")


async def main() -> None:
    run_dir, *sizes, ledger_gb, restored, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid))
    checkpoint, position = None, ""
    if restored:
        step, version, position = json.loads(restored)
        checkpoint = Restored(step, version)
    folder = ledger_folder(Path(run_dir), "rollouts")
    async with (
        Recorder(folder, fail, float(ledger_gb) * 1e9) as recorder,
        asyncio.TaskGroup() as tasks,
    ):
        manager = SoakManager(recorder, [int(size) for size in sizes])
        num_groups = await manager.recover(checkpoint, position)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        write_line(groups=num_groups, peak_mb=peak_mb, cpu_s=time.process_time())
        tasks.create_task(recorder.run())
        while manager.writes:
            await manager.write_step()


if __name__ == "__main__":
    asyncio.run(main())
