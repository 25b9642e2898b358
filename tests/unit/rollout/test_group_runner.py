"""Groups from their admission to their rewards: run, recovered, failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from ledger_samples import runs_of
from recorded_world import Workers
from rollout_samples import make_trajectory

from umbra.runtime.errors import LedgerError, RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.agents.worker_pool import WorkerJob
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory, Turn
from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Event,
    Finished,
    RewardParts,
    Scored,
    Started,
    TeacherLogprobs,
    Version,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.dropped_groups import FailedGroups
from umbra.runtime.rollout.manager.group_recovery import Recovered, recover_groups
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
        self.asked_with: dict[str, list[int]] = {}  # their prompts
        self.withdrawn: list[str] = []  # of them

    def submit(self, turn: Turn) -> None:
        self.turns.append(turn)

    def on_scored(self, group: Group) -> None:
        self.scored.append(group)

    def ask(self, sample: Trajectory, prompt: Any, on_answer: Callable[[Any], None]) -> None:
        self.questions[sample.sample_id] = on_answer
        self.asked_with[sample.sample_id] = prompt.tolist()

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


def test_a_teacher_that_sees_a_success_is_asked_when_rewards_are_known() -> None:
    parts = [np.asarray(part, np.int32) for part in ([8], [9, 9])]
    prompt = Prompt("p", "a question", np.ones(2, np.int32), {}, parts)
    samples = [finished(prompt, k, num_tokens=2) for k in range(3)]
    samples[1].finish_reason = "length"  # it has no end token
    group, neighbours = Group("g", samples, 0), Neighbours()
    start(group, neighbours, has_teacher=True)
    assert not neighbours.questions

    neighbours.queue[0].on_result({"rewards": [0.0, 1.0, 0.5], "parts": {}})

    assert neighbours.asked_with == {"p/0": [8, 1, 1, 9, 9], "p/2": [8, 1, 1, 9, 9]}
    neighbours.questions["p/0"](np.asarray([-1.0, -2.0], np.float32))
    assert not neighbours.scored
    neighbours.questions["p/2"](np.asarray([-3.0, -4.0], np.float32))
    assert neighbours.scored == [group]
    told = [sample.teacher_logprobs for sample in samples]
    assert [found.tolist() for found in told if found is not None] == [[-1, -2], [0, 0], [-3, -4]]


def test_a_teacher_without_a_success_to_see_agrees_with_the_policy() -> None:
    prompt = Prompt("p", "a question", np.ones(2, np.int32), {}, [np.ones(1, np.int32)] * 2)
    samples = [finished(prompt, k) for k in range(2)]
    group, neighbours = Group("g", samples, 0), Neighbours()
    start(group, neighbours, has_teacher=True)

    neighbours.queue[0].on_result({"rewards": [0.9, 0.0], "parts": {}})

    assert (neighbours.questions, neighbours.scored) == ({}, [group])
    assert [sample.teacher_logprobs for sample in samples] == [[0.0], [0.0]]


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


BOTH = uids_of(0, 1)


def recovered(*parts: Event, names: tuple[str, ...] = ("exact", "short")) -> Group:
    """The group of two scored samples, as a manager that compares `names` has it again."""
    return recover(*parts, names=names).ready[0]


def recover(*parts: Event, names: tuple[str, ...] = (), has_teacher: bool = False) -> Recovered:
    state = LedgerState()
    for event in (
        Version(0, 0),
        Admitted(0, "g", "p", 0, 0, np.zeros(2, np.int64)),
        Started(BOTH),
        runs_of((0, 0, 0, [5]), (1, 0, 0, [6])),
        Finished(BOTH, ["stop", "stop"]),
        *parts,
        Scored(BOTH, np.asarray([1.0, 1.0])),
    ):
        state.apply(event)
    samples = [make_trajectory(sample_id=f"g/{k}") for k in range(2)]
    return recover_groups(
        state, lambda idx: Group("g", samples, idx, names), has_teacher=has_teacher
    )


def test_a_group_waits_for_its_teacher_again_unless_the_ledger_has_all_answers() -> None:
    answers = [TeacherLogprobs(uid, np.asarray([-uid - 0.5], np.float32)) for uid in (0, 1)]

    whole, half = recover(*answers, has_teacher=True), recover(answers[0], has_teacher=True)

    assert [sample.teacher_logprobs for sample in whole.ready[0].trajectories] == [[-0.5], [-1.5]]
    assert [sample.teacher_logprobs for sample in half.open[0].trajectories] == [[-0.5], None]


def test_a_run_without_a_teacher_has_no_answers_of_an_earlier_one() -> None:
    """They would be a column of some of a batch's samples."""
    group = recover(TeacherLogprobs(0, np.asarray([-0.5], np.float32))).ready[0]

    assert [sample.teacher_logprobs for sample in group.trajectories] == [None, None]


def test_parts_of_rewards_are_compared_again_after_a_recovery() -> None:
    values = np.asarray([0.25, math.nan, 1.0, 0.5])  # sample after sample

    group = recovered(RewardParts(BOTH, ["short", "exact"], values))

    assert str(group.compared_rewards.tolist()) == "[[nan, 0.5], [0.25, 1.0]]"
    assert not group.has_zero_variance


def test_rewards_without_the_parts_to_compare_are_refused() -> None:
    of_one = RewardParts(BOTH, ["exact"], np.zeros(2))

    with pytest.raises(
        LedgerError, match=r"reward of g/0 without the part 'short', which train.ad"
    ):
        recovered(of_one)
    with pytest.raises(LedgerError, match="reward of g/0 without the part 'exact'"):
        recovered()
    assert recovered(names=()).compared_rewards.tolist() == [[1.0, 1.0]]


class World:
    """Failing groups, at a time that the test says."""

    def __init__(self, max_failed_share: float = 1.0) -> None:
        self.now = 1000.0
        self.notes: list[str] = []
        self._num_failed = 0
        self.groups = FailedGroups(max_failed_share, self.notes.append, lambda: self.now)

    def fail(self, error: RolloutError, text: str = "3,7=", num_admitted: int = 9) -> None:
        prompt = Prompt("p", text, np.zeros(1, np.int32), {})
        sample = Trajectory("g/0", prompt, 0, budget=4, max_context_len=8)
        self._num_failed += 1
        self.groups.failed(Group(f"g{self._num_failed}", [sample]), error, num_admitted)


def test_a_failed_group_is_reported_with_its_prompt_and_its_reason() -> None:
    world = World(0.05)

    world.fail(RewardError("took longer than 120 s"))

    assert world.notes == [
        "group g1 (prompt '3,7=') is dropped: took longer than 120 s "
        "(1 of the last 1 groups failed, 10 of 200 may)"
    ]


def test_a_long_prompt_and_a_long_reason_are_cut() -> None:
    world = World()

    world.fail(RewardError("<html>" + 9000 * "x"), text="begin" + 9000 * "-" + "end")

    assert "'begin--" in world.notes[0]
    assert "--end'" in world.notes[0]
    assert len(world.notes[0]) < 1300


def test_many_groups_at_once_are_counted_and_reported_with_a_later_one() -> None:
    world = World()
    for _ in range(8):
        world.fail(RewardError("no"))
        world.now += 1.0
    assert len(world.notes) == 5

    world.now += 55.0
    world.fail(RewardError("no"))

    assert world.notes[5:] == [
        "group g9 (prompt '3,7=') is dropped: no (9 of the last 9 groups failed, 200 of 200 may; "
        "for the 3 before it see umbra ledger RUN_DIR --state dropped)"
    ]


@pytest.mark.parametrize("kind", [RewardError, RolloutError])
def test_more_than_allowed_end_the_run_with_the_last_reason(kind: type[RolloutError]) -> None:
    world = World(0.01)
    world.fail(kind("no"))
    for _ in range(199):
        world.groups.scored()

    world.fail(kind("no"))  # the first is no longer among the last 200
    world.fail(kind("no"))
    with pytest.raises(kind, match=r"^not again; 3 of the last 200 groups .* 0.01, 2 of 200"):
        world.fail(kind("not again"))

    assert len(world.notes) == 3


@pytest.mark.parametrize(
    ("share", "num_admitted", "num_failures"),
    [(0.0, 64, 1), (0.05, 8, 3), (0.05, 64, 4), (0.05, 999, 11), (0.5, 8, 10)],
)
def test_a_run_of_which_all_groups_failed_ends_early(
    share: float, num_admitted: int, num_failures: int
) -> None:
    world = World(share)
    for _ in range(num_failures - 1):
        world.fail(RewardError("no"), num_admitted=num_admitted)

    with pytest.raises(RewardError, match=rf"{num_failures} of the last {num_failures} groups"):
        world.fail(RewardError("no"), num_admitted=num_admitted)


def test_failures_of_a_function_that_fails_rarely_are_allowed_from_the_start() -> None:
    world = World(0.05)
    for _ in range(5):
        world.fail(RewardError("no"))
        world.groups.scored()
        world.fail(RewardError("no"))

    assert world.notes[4].endswith("(5 of the last 7 groups failed, 10 of 200 may)")
    with pytest.raises(RewardError, match=r"11 of the last 16 groups .* 0.05, 10 of 200"):
        world.fail(RewardError("no"))
