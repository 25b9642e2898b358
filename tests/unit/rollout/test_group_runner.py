"""Calls that a group makes of rollout workers."""

from __future__ import annotations

from typing import Any

import numpy as np
from recorded_world import Workers

from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.prompts import Prompt, to_row
from umbra.runtime.rollout.rollout_config import DispatchConfig, RolloutConfig
from umbra.runtime.rpc.wire import Encoder


def finished(prompt: Prompt, idx: int) -> Trajectory:
    sample = Trajectory(f"{prompt.prompt_id}/{idx}", prompt, idx, budget=4, max_context_len=9)
    sample.append_generated(np.asarray([idx], np.int32), np.zeros(1, np.float32), 1)
    sample.finish("stop")
    return sample


def score_call(samples: list[Trajectory]) -> tuple[Any, Any, Any]:
    """The arguments of the call that scores a group."""
    workers = Workers()
    config = RolloutConfig(
        dispatch=DispatchConfig(pool="p", max_context_len=9),
        prompts_path="",
        world_size=1,
        worker_names=("w",),
        seed=0,
    )
    unused: Any = None
    pool: Any = workers
    runner = GroupRunner(config, unused, unused, pool, Recorder(None, unused), "manager")
    runner.start(Group("g", samples), config.settings.sampling, unused)
    (job,) = workers.queue
    arguments: Any = job.make_arguments()
    return arguments


def test_a_row_goes_to_a_worker_once_for_all_completions_of_its_prompt() -> None:
    prompt = Prompt("p", "a question", np.ones(2, np.int32), {"tests": ["x" * 100_000]})

    prompts, items, manager = score_call([finished(prompt, idx) for idx in range(16)])

    frames = Encoder().encode([prompts, items, manager])
    assert sum(len(frame) for frame in frames) < 110_000
    assert [item["prompt"] for item in items] == [0] * 16
    assert [item["tokens"].tolist() for item in items] == [[idx] for idx in range(16)]
    assert (prompts[0]["text"], to_row(prompts[0]["row"])) == (prompt.text, prompt.row)


def test_samples_of_several_prompts_name_their_own() -> None:
    first, second = (Prompt(name, name, np.ones(2, np.int32), {"of": name}) for name in "ab")

    prompts, items, _ = score_call([finished(p, k) for k, p in enumerate((first, second, first))])

    assert [to_row(prompts[item["prompt"]]["row"])["of"] for item in items] == ["a", "b", "a"]
