"""Calls that a group makes of rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from recorded_world import Workers

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.agents.worker_pool import WorkerJob
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.group_runner import GroupRunner, overlong_share
from umbra.runtime.rollout.prompts import Prompt, to_row
from umbra.runtime.rollout.rollout_config import (
    DispatchConfig,
    RolloutConfig,
    RolloutSettings,
)
from umbra.runtime.rpc.wire import Encoder

PROMPT = Prompt("p", "a question", np.ones(2, np.int32), {})


class Neighbours(Workers):
    """The group's owner, the dispatcher, the workers and the sessions of agent loops."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[UmbraError] = []
        self.turns: list[Turn] = []
        self.scored: list[Group] = []
        self.questions: dict[str, Callable[[Any], None]] = {}  # of the teacher, by sample
        self.withdrawn: list[str] = []  # of them

    def submit(self, turn: Turn) -> None:
        self.turns.append(turn)

    def on_scored(self, group: Group) -> None:
        self.scored.append(group)

    def ask(self, sample: Trajectory, on_answer: Callable[[Any], None]) -> None:
        self.questions[sample.sample_id] = on_answer

    def withdraw(self, samples: Sequence[Trajectory]) -> None:
        self.withdrawn += [sample.sample_id for sample in samples]

    def on_failed(self, group: Group, error: UmbraError) -> None:
        self.errors.append(error)

    def cancel(self, turns: list[Turn]) -> None:
        self.turns = [turn for turn in self.turns if turn not in turns]

    def settle(self, sample: Trajectory) -> None: ...

    def close(self, sample: Trajectory) -> None: ...


def finished(prompt: Prompt, idx: int, num_tokens: int = 1) -> Trajectory:
    name = f"{prompt.prompt_id}/{idx}"
    sample = Trajectory(name, prompt, idx, budget=num_tokens, max_context_len=99)
    tokens = np.full(num_tokens, idx, np.int32)
    sample.append_generated(tokens, np.zeros(num_tokens, np.float32), 1)
    sample.finish("stop")
    return sample


def start(
    group: Group, neighbours: Neighbours, *, has_teacher: bool = False, **settings: Any
) -> GroupRunner:
    config = RolloutConfig(
        dispatch=DispatchConfig(pool="p", max_context_len=99),
        prompts_path="",
        world_size=1,
        worker_names=("w",),
        seed=0,
        **settings,
    )
    unused: Any = None
    other: Any = neighbours
    teacher = other if has_teacher else None
    recorder = Recorder(None, unused)
    runner = GroupRunner(config, other, other, other, recorder, "manager", teacher)
    runner.start(group, config.settings.sampling, other)
    return runner


def job_of(group: Group, neighbours: Neighbours | None = None, **settings: Any) -> WorkerJob:
    """The first job of a group."""
    neighbours = neighbours or Neighbours()
    start(group, neighbours, **settings)
    return neighbours.queue[0]


def score_call(samples: list[Trajectory]) -> tuple[Any, Any, Any]:
    """The arguments of the call that scores a group."""
    arguments: Any = job_of(Group("g", samples)).make_arguments()
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


@pytest.mark.parametrize("names", ["aa", "ab"])
def test_turns_prefer_one_engine_only_for_a_shared_prompt_and_end_with_their_group(
    names: str,
) -> None:
    prompts = [Prompt(name, name, np.ones(2, np.int32), {}) for name in names]
    samples = [Trajectory("s", prompt, 0, budget=4, max_context_len=99) for prompt in prompts]
    group, neighbours = Group("g", samples), Neighbours()

    runner = start(group, neighbours)

    assert [turn.group for turn in neighbours.turns] == [group if names == "aa" else None] * 2
    runner.abandon(group)
    assert neighbours.turns == []


def scored(group: Group, *, penalty: float = 0.5) -> Group:
    """A group of three, with rewards of 1, 2 and 3."""
    settings = RolloutSettings(max_new_tokens=10)
    job = job_of(group, settings=settings, overlong_buffer=4, overlong_penalty=penalty)
    job.on_result({"rewards": [1.0, 2.0, 3.0], "parts": {"exact": [4.0, 5.0, 6.0]}})
    return group


def test_a_completion_loses_more_the_further_it_is_into_the_overlong_buffer() -> None:
    group = scored(Group("g", [finished(PROMPT, k, n) for k, n in enumerate((6, 9, 10))], 0))

    assert [sample.reward for sample in group.trajectories] == [1.0, 2.0 - 0.375, 3.0 - 0.5]
    assert [sample.reward_parts for sample in group.trajectories] == [
        {"exact": 4.0, "overlong": 0.0},
        {"exact": 5.0, "overlong": -0.75},
        {"exact": 6.0, "overlong": -1.0},
    ]


def test_an_evaluation_has_no_overlong_penalty() -> None:
    group = scored(Group("eval/0", [finished(PROMPT, k, 10) for k in range(3)]))

    assert [sample.reward for sample in group.trajectories] == [1.0, 2.0, 3.0]
    assert group.trajectories[0].reward_parts == {"exact": 4.0}


def test_the_reward_of_an_agent_loop_has_the_overlong_penalty() -> None:
    sample = Trajectory("p/0", PROMPT, 0, budget=10, max_context_len=99)
    sample.append_generated(np.ones(9, np.int32), np.zeros(9, np.float32), 1)
    settings = RolloutSettings(max_new_tokens=10, agent="m:loop")

    job_of(Group("g", [sample], 0), settings=settings, overlong_buffer=4).on_result(2.0)

    assert (sample.reward, sample.reward_parts) == (1.25, {"overlong": -0.75})


@pytest.mark.parametrize("buffer", [1, 3, 7, 20])
def test_the_overlong_penalty_is_that_of_dapo(buffer: int) -> None:
    for length in range(22):
        if length <= 20 - buffer:  # eq. 13, case by case
            expected = 0.0
        elif length <= 20:
            expected = ((20 - buffer) - length) / buffer
        else:
            expected = -1.0

        assert -overlong_share(length, 20, buffer) == expected


def test_a_reward_of_an_agent_loop_has_no_parts_to_compare() -> None:
    neighbours = Neighbours()
    sample = Trajectory("p/0", PROMPT, 0, budget=10, max_context_len=99)
    settings = RolloutSettings(max_new_tokens=10, agent="m:loop")

    job_of(Group("g", [sample], 0, ("exact",)), neighbours, settings=settings).on_result(2.0)

    assert sample.reward is None
    (error,) = neighbours.errors
    assert str(error).startswith("the agent loop of p/0 returned a reward, and train.advantage")


def test_a_group_is_delivered_with_its_rewards_and_all_of_its_teacher_s_answers() -> None:
    samples = [finished(PROMPT, k) for k in range(3)]
    samples[1].teacher_logprobs = np.asarray([-3.0], np.float32)  # from the ledger
    group, neighbours = Group("g", samples, 0), Neighbours()
    runner = start(group, neighbours, has_teacher=True)
    assert sorted(neighbours.questions) == ["p/0", "p/2"]
    assert runner.num_at_teacher() == 0  # it waits for the reward, too

    neighbours.questions["p/2"](np.asarray([-2.0], np.float32))
    neighbours.queue[0].on_result({"rewards": [0.0, 0.0, 0.0], "parts": {}})
    assert not neighbours.scored
    assert runner.num_at_teacher() == 1
    neighbours.questions["p/0"](np.asarray([-1.0], np.float32))

    assert neighbours.scored == [group]
    assert runner.num_at_teacher() == 0
    assert [sample.teacher_logprobs for sample in samples] == [[-1.0], [-3.0], [-2.0]]


def test_a_late_answer_of_the_teacher_changes_nothing_in_a_group_that_was_given_up() -> None:
    group, neighbours = Group("g", [finished(PROMPT, 0)], 0), Neighbours()
    start(group, neighbours, has_teacher=True).abandon(group)
    assert neighbours.withdrawn == ["p/0"]

    neighbours.questions["p/0"](np.asarray([-1.0], np.float32))

    assert group.trajectories[0].teacher_logprobs is None


def test_evaluations_have_no_teacher() -> None:
    neighbours = Neighbours()

    start(Group("eval/0", [finished(PROMPT, 0)]), neighbours, has_teacher=True)

    assert not neighbours.questions
