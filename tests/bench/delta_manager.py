"""One rollout manager's process that takes the deltas of simulated engines, and measures itself.

`python tests/bench/delta_manager.py FOLDER NUM_ENGINES NUM_TRAJECTORIES DURATION_S COMPLETION_LEN
LEDGER PARENT_PID`, beside processes of `delta_engines`. LEDGER is the ledger's folder, "" for none.

The real links, dispatcher, router, trajectories and ledger over real RPC streams; no supervisor, no
rewards. Whatever finishes is replaced by a new trajectory, so as many are always in
flight. Processor time is that of the whole process, ZMQ's own thread included.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from delta_engines import TICK_S, Pace, ref

from umbra.runtime.engine_api.delta_batch import DeltaBatch
from umbra.runtime.errors import UmbraError
from umbra.runtime.process.prctl import die_with_parent
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.engine_link import EngineLink
from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.dispatch.turn import Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.sampling_options import SamplingOptions
from umbra.runtime.rpc.rpc_client import Client, Handle

GROUP_SIZE: Final = 8
PROMPT_LEN: Final = 128
_STOP_TOKEN_IDS: Final = [0]
_CALL_TIMEOUT_S: Final = 60.0


class _TimedDispatcher(Dispatcher):
    """Notes when each batch of each engine was applied, and counts tokens."""

    def __init__(self, router: Router, recorder: Recorder) -> None:
        super().__init__(router, _fail, recorder)
        self.applied_at: dict[EngineId, array[float]] = {}
        self.num_tokens = 0
        self.num_runs = 0
        self.all_heard = asyncio.Event()

    def on_batch(self, engine: EngineId, batch: DeltaBatch) -> None:
        super().on_batch(engine, batch)
        self.num_tokens += len(batch.tokens)
        self.num_runs += len(batch.ids)
        self.applied_at[engine].append(time.monotonic())
        if not self.all_heard.is_set() and all(self.applied_at.values()):
            self.all_heard.set()


def _fail(error: UmbraError) -> None:
    raise error


class _Load:
    """Keeps a number of trajectories in flight."""

    def __init__(
        self, dispatcher: Dispatcher, recorder: Recorder, count: int, completion_len: int
    ) -> None:
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._count = count
        self._completion_len = completion_len
        self.groups: list[Group] = []
        self.num_finished = 0

    def begin(self) -> None:
        """All at once, with completions of every length, so that they end one by one later."""
        for first in range(0, self._count, GROUP_SIZE):
            tokens = np.arange(PROMPT_LEN, dtype=np.int32)
            prompt = Prompt(f"p{first}", f"prompt {first}", tokens, {})
            size = min(GROUP_SIZE, self._count - first)
            lengths = [1 + (first + k) * self._completion_len // self._count for k in range(size)]
            samples = [self._trajectory(prompt, k, lengths[k]) for k in range(size)]
            group = Group(f"e0/p{first}", samples)
            self._recorder.admitted(group, 0, first)
            self.groups.append(group)
            for k in range(size):
                self._submit(group, k)

    @property
    def num_tokens_held(self) -> int:
        return sum(s.completion_len for group in self.groups for s in group.trajectories)

    def _trajectory(self, prompt: Prompt, idx: int, length: int) -> Trajectory:
        name = f"e0/{prompt.prompt_id}/{idx}"
        return Trajectory(name, prompt, 2**40 + idx, budget=length, max_context_len=2**15)

    def _submit(self, group: Group, idx: int) -> None:
        sample = group.trajectories[idx]

        def on_end(_turn: Turn, reason: str) -> None:
            sample.finish(reason)
            assert sample.completion_len == sample.budget, (sample.completion_len, sample.budget)
            sample.reward = 1.0
            self._recorder.finished(sample)
            self._recorder.scored([sample])
            self.num_finished += 1
            successor = self._trajectory(sample.prompt, idx, self._completion_len)
            group.trajectories[idx] = successor
            name = f"e{self.num_finished}/{sample.prompt.prompt_id}"
            self._recorder.admitted(Group(name, [successor]), 0, self._count + self.num_finished)
            self._submit(group, idx)

        self._dispatcher.submit(
            Turn(
                trajectory=sample,
                group=group,
                start=0,
                limit=sample.budget,
                sampling=SamplingOptions(temperature=1.0, stop_token_ids=_STOP_TOKEN_IDS),
                on_end=on_end,
            )
        )


class _Window:
    """The work done between two moments."""

    def __init__(self, dispatcher: _TimedDispatcher, load: _Load) -> None:
        self._dispatcher = dispatcher
        self._load = load
        self.began, self._cpu = time.monotonic(), time.process_time()
        self._tokens, self._runs = dispatcher.num_tokens, dispatcher.num_runs
        self._finished = load.num_finished

    def close(self) -> dict[str, float]:
        self.ended = time.monotonic()
        wall_s, cpu_s = self.ended - self.began, time.process_time() - self._cpu
        tokens = self._dispatcher.num_tokens - self._tokens
        runs = self._dispatcher.num_runs - self._runs
        finished = self._load.num_finished - self._finished
        return {
            "requests_per_s": finished / wall_s,
            "requests_per_cpu_s": finished / cpu_s,
            "tokens_per_s": tokens / wall_s,
            "tokens_per_cpu_s": tokens / cpu_s,
            "cpu_share": cpu_s / wall_s,
            "cpu_us_per_run": cpu_s / max(1, runs) * 1e6,
        }


async def _measure(
    folder: Path,
    num_engines: int,
    num_trajectories: int,
    duration_s: float,
    completion_len: int,
    ledger: str,
) -> dict[str, float]:
    per_engine = -(-num_trajectories // num_engines)
    async with (
        Recorder(Path(ledger) if ledger else None, _fail) as recorder,
        Client("here") as client,
        asyncio.TaskGroup() as tasks,
    ):
        dispatcher = _TimedDispatcher(Router(per_engine + GROUP_SIZE), recorder)
        handles: dict[EngineId, Handle] = {}
        links: list[asyncio.Task[None]] = []
        for idx in range(num_engines):
            engine = EngineId(f"e{idx}", 1)
            handles[engine] = client.handle(ref(idx, folder))
            dispatcher.applied_at[engine] = array("d")
            link = EngineLink(
                engine,
                handles[engine],
                dispatcher,
                delta_timeout_s=_CALL_TIMEOUT_S,
                submit_timeout_s=_CALL_TIMEOUT_S,
            )
            dispatcher.attach(engine, link)
            link.set_serving(True)
            links.append(tasks.create_task(link.run()))
        await dispatcher.all_heard.wait()
        load = _Load(dispatcher, recorder, num_trajectories, completion_len)
        facts = await _phases(dispatcher, handles, load, num_trajectories, duration_s)
        for task in links:
            task.cancel()
    return facts


async def _phases(
    dispatcher: _TimedDispatcher,
    handles: dict[EngineId, Handle],
    load: _Load,
    num_trajectories: int,
    duration_s: float,
) -> dict[str, float]:
    gc.collect()
    resident_before = _resident_nbytes()
    load.begin()
    while sum(await _of_all(handles, "num_requests")) < num_trajectories:
        pass  # the calls take their time
    await _of_all(handles, "set_pace", "tick")
    await asyncio.sleep(10 * TICK_S)
    paced_window = _Window(dispatcher, load)
    await asyncio.sleep(duration_s)
    paced = paced_window.close()
    gc.collect()
    resident = _resident_nbytes() - resident_before
    held = load.num_tokens_held
    await _of_all(handles, "set_pace", "paused")
    latencies_s = _latencies(
        dispatcher, paced_window, dict(zip(handles, await _of_all(handles, "made_at"), strict=True))
    )
    await _of_all(handles, "set_pace", "full")
    await asyncio.sleep(0.2)
    full_window = _Window(dispatcher, load)
    await asyncio.sleep(duration_s)
    full = full_window.close()
    await _of_all(handles, "set_pace", "paused")
    dispatcher.check_integrity()
    return {
        **full,
        "delta_p50_ms": float(np.percentile(latencies_s, 50)) * 1e3,
        "delta_p99_ms": float(np.percentile(latencies_s, 99)) * 1e3,
        "paced_tokens_per_s": paced["tokens_per_s"],
        "paced_cpu_share": paced["cpu_share"],
        "bytes_per_trajectory": resident / num_trajectories,
        "tokens_per_trajectory": held / num_trajectories,
        "num_finished": float(load.num_finished),
    }


def _latencies(
    dispatcher: _TimedDispatcher, window: _Window, made_at: dict[EngineId, Any]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """From a batch's making to its having been applied, for all batches made in the window."""
    late: list[Any] = []
    for engine, made in made_at.items():
        applied = np.asarray(dispatcher.applied_at[engine])
        both = min(len(made), len(applied))
        wanted = (made[:both] >= window.began) & (made[:both] < window.ended)
        late.append((applied[:both] - made[:both])[wanted])
    return np.concatenate(late)


async def _of_all(handles: dict[EngineId, Handle], method: str, *args: Pace) -> list[Any]:
    calls = [handle.call(method, *args, timeout_s=_CALL_TIMEOUT_S) for handle in handles.values()]
    return await asyncio.gather(*calls)


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    folder, num_engines, num_trajectories, duration_s, completion_len, ledger, parent = sys.argv[1:]
    die_with_parent(int(parent))
    sizes = int(num_engines), int(num_trajectories), float(duration_s), int(completion_len)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        facts = runner.run(_measure(Path(folder), *sizes, ledger))
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
