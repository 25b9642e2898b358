"""The staleness bound, as a pure rule and in the flow of groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.runtime.errors import RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.admission import StalenessBound, VersionSteps
from umbra.runtime.rollout.manager.group_recovery import Recovered
from umbra.runtime.rollout.manager.group_runner import GroupOwner
from umbra.runtime.rollout.manager.training_flow import TrainingFlow
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import RolloutSettings, SamplingOptions

UNIFORM = ((0.0, 0.0), (1.0, 1.0))


class World:
    """Groups that generate and are scored when the test says; replaces engines and rewards.

    Version v is that of the weights after v - 100 steps.
    """

    def __init__(self, **changes: Any) -> None:
        self.settings = RolloutSettings(groups_per_step=2, group_size=2, **changes)
        self.running: dict[str, Group] = {}
        self.failure: UmbraError | None = None
        self.num_generated = 0
        self.notes: list[str] = []
        self.step = 0
        everything_else: Any = self
        self.flow = TrainingFlow(
            self.settings,
            everything_else,
            everything_else,
            Recorder(None, self._on_failure),
            everything_else,
            self._on_failure,
            self.notes.append,
        )
        self.learn = self.flow.versions.learn

    def advance(self, step: int) -> None:
        self.step = step
        self.learn(step + 100, step)
        self.flow.advance(step)

    # as Admission
    num_prompts = 1500

    def training_group(self, order_idx: int) -> Group:
        prompt = Prompt(f"p{order_idx}", "", np.zeros(1, np.int32), {})
        samples = [
            Trajectory(f"p{order_idx}/{k}", prompt, k, budget=100, max_context_len=200)
            for k in range(self.settings.group_size)
        ]
        return Group(f"p{order_idx}", samples, order_idx)

    def epoch_of(self, order_idx: int) -> int:
        return 0

    # as GroupRunner
    def start(self, group: Group, _: SamplingOptions, owner: GroupOwner) -> None:
        assert owner is self.flow
        self.running[group.group_id] = group

    def abandon(self, group: Group) -> None:
        self.running.pop(group.group_id, None)

    # as Dispatcher; `num_generated` is an attribute
    def take_metrics(self) -> dict[str, float]:
        return {}

    # what engines and rewards do
    def generate(self, group_id: str, *, is_updated: bool = False) -> None:
        """One token more in each trajectory, under the weights of now or those that come next."""
        version = self.step + 100 + is_updated
        for sample in self.running[group_id].trajectories:
            sample.append_generated(np.ones(1, np.int32), np.zeros(1, np.float32), version)
            self.num_generated += 1

    def score(self, group_id: str, rewards: tuple[float, float] = (0.0, 1.0)) -> None:
        group = self.running.pop(group_id)
        for sample, reward in zip(group.trajectories, rewards, strict=True):
            sample.reward = reward
        self.flow.on_scored(group)

    def fail(self, group_id: str) -> None:
        group = self.running.pop(group_id)
        self.flow.on_failed(group, RewardError(f"no reward for {group_id}"))

    def taken(self) -> list[str] | None:
        groups = self.flow.take(self.step)
        return None if groups is None else [group.group_id for group in groups]

    def _on_failure(self, error: UmbraError) -> None:
        self.failure = error


def ids(*indices: int) -> list[str]:
    return [f"p{order_idx}" for order_idx in indices]


@pytest.mark.parametrize(("max_staleness", "num_running"), [(0, 2), (1, 4), (3, 8)])
def test_so_many_groups_are_admitted_ahead(max_staleness: int, num_running: int) -> None:
    world = World(max_staleness=max_staleness)

    world.advance(0)

    assert list(world.running) == ids(*range(num_running))


def test_on_policy_nothing_is_generated_while_the_ranks_train() -> None:
    world = World()
    world.advance(0)
    for group_id in ids(0, 1):
        world.generate(group_id)
        world.score(group_id)

    assert world.taken() == ids(0, 1)
    world.flow.admit()
    assert not world.running
    world.advance(1)
    assert list(world.running) == ids(2, 3)
    assert world.flow.num_trained == 2


def test_one_step_off_the_next_batch_is_generated_meanwhile() -> None:
    world = World(max_staleness=1)
    world.advance(0)
    for group_id in ids(0, 1, 2, 3):
        world.generate(group_id)
        world.score(group_id)

    assert world.taken() == ids(0, 1)
    world.advance(1)
    assert list(world.running) == ids(4, 5)
    assert world.taken() == ids(2, 3)
    assert world.flow.metrics(world.flow.take(1) or [])["staleness_mean"] == 1.0


def test_a_batch_that_an_earlier_incarnation_leased_has_no_metrics_of_that_time() -> None:
    world = World()
    world.advance(0)
    for group_id in ids(0, 1):
        world.generate(group_id)
        world.score(group_id)
    groups = world.flow.take(0) or []
    measured = world.flow.metrics(groups)

    world.flow.restore(Recovered({}, {}, {0: groups}, 2, 2, 0))
    world.advance(0)

    again = world.flow.metrics(world.flow.take(0) or [])
    assert measured.keys() - again.keys() == {"gen_s", "tokens_per_s", "dropped_tokens"}
    assert again.items() <= measured.items()


def test_a_batch_without_a_generated_token_has_no_ages_and_no_rate() -> None:
    world = World()
    world.advance(0)
    for group_id in ids(0, 1):
        world.score(group_id)

    metrics = world.flow.metrics(world.flow.take(0) or [])

    assert [name for name in metrics if name.startswith("staleness")] == []
    assert metrics.keys().isdisjoint({"gen_s", "tokens_per_s"})


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_rate_counts_the_tokens_of_its_own_time_not_those_of_the_batch(
    max_staleness: int,
) -> None:
    def num_counted(step: int) -> int:
        metrics = world.flow.metrics(world.flow.take(step) or [])
        return round(metrics["tokens_per_s"] * metrics["gen_s"])

    world = World(max_staleness=max_staleness)
    world.num_generated += 500  # for held-out prompts, before the first step
    world.advance(0)
    ahead = ids(*range(2 + 2 * max_staleness))
    for group_id in ahead:
        world.generate(group_id)
        world.score(group_id)

    assert num_counted(0) == 2 * len(ahead), "those that wait for the next batch, too"
    world.num_generated += 500  # for held-out prompts, between the steps
    world.advance(1)
    if not max_staleness:
        for group_id in ids(2, 3):
            world.generate(group_id)
            world.score(group_id)
        world.advance(1)  # a rank asks again
    assert num_counted(1) == (500 if max_staleness else 4), "not those that waited"


def test_a_batch_is_the_same_however_often_it_is_asked_for() -> None:
    world = World(max_staleness=1)
    world.advance(0)
    for group_id in ids(3, 1, 0, 2):
        world.score(group_id)

    assert world.taken() == world.taken() == ids(0, 1)
    world.advance(0)
    assert world.taken() == ids(0, 1)
    world.advance(1)
    with pytest.raises(RolloutError, match="step 1 was requested after that of 2"):
        world.advance(0)


def test_in_order_the_slowest_is_waited_for_and_first_finished_it_is_not() -> None:
    for batch_order, batch in (("in_order", None), ("first_finished", ids(1, 3))):
        world = World(max_staleness=1, batch_order=batch_order)
        world.advance(0)
        for group_id in ids(3, 1):
            world.score(group_id)

        assert world.taken() == batch


def test_what_was_overtaken_too_often_is_dropped_and_replaced() -> None:
    world = World(max_staleness=1, batch_order="first_finished")
    world.advance(0)
    world.generate("p0")
    for step in (0, 1):
        world.advance(step)
        for group_id in [g for g in world.running if g != "p0"]:
            world.score(group_id)
        assert "p0" in world.running
        assert world.taken() is not None

    world.advance(2)

    assert "p0" not in world.running
    assert world.flow.dropped == {"too old": 1}


def test_groups_that_teach_nothing_are_replaced_by_others() -> None:
    world = World(drop_zero_variance_groups=True)
    world.advance(0)
    world.score("p0", (1.0, 1.0))
    world.score("p1")

    assert world.taken() is None
    assert list(world.running) == ids(2)
    world.score("p2")
    assert world.taken() == ids(1, 2)
    assert world.flow.dropped == {"all rewards equal": 1}


def test_rare_groups_of_use_never_end_the_run_and_are_noted_ever_less() -> None:
    world = World(drop_zero_variance_groups=True)
    world.advance(0)
    for order_idx in range(1499 * 4):
        is_kept = order_idx % 1499 == 1498
        world.score(f"p{order_idx}", (0.0, 1.0) if is_kept else UNIFORM[order_idx % 2])
        if is_kept and (batch := world.taken()):
            assert len(batch) == 2
            world.advance(world.step + 1)

    assert world.failure is None
    assert world.step == 2
    assert [note.split()[0] for note in world.notes] == ["100", "200", "400", "800", "1600"]
    assert "rollout.drop_zero_variance_groups" in world.notes[0]
    assert "needs 2 and has 1" in world.notes[-1]
    assert "(from 0 to 1 lately)" in world.notes[-1]


def test_an_epoch_in_a_row_without_a_group_of_use_ends_the_run() -> None:
    world = World(drop_zero_variance_groups=True)
    world.advance(0)
    world.score("p0")
    for order_idx in range(1, 1500):
        world.score(f"p{order_idx}", (1.0, 1.0))
    assert world.failure is None

    world.score("p1500", (1.0, 1.0))

    assert isinstance(world.failure, RolloutError)
    assert "1500 groups in a row were dropped, out of 1500 prompts" in str(world.failure)
    assert "(1 in all of them)" in str(world.failure)
    assert not world.running.keys() - {"p1501"}


def test_more_than_needed_are_generated_and_the_rest_is_too_old_on_policy() -> None:
    world = World(over_sampling=1.5)
    world.advance(0)
    assert list(world.running) == ids(0, 1, 2)
    world.generate("p0")
    for group_id in ids(2, 1):
        world.score(group_id)

    assert world.taken() == ids(1, 2)
    world.advance(1)
    assert list(world.running) == ids(3, 4, 5)
    assert world.flow.dropped == {"too old": 1}


def test_a_failure_costs_its_group_and_many_cost_the_job() -> None:
    world = World()
    world.advance(0)
    world.fail("p0")
    assert world.failure is None
    assert list(world.running) == ids(1, 2)
    assert world.notes == [
        "group p0 (prompt '') is dropped: no reward for p0 (1 of the last 1 groups failed, 10 of "
        "200 may)"
    ]
    world.fail("p1")
    assert world.failure is None
    world.fail("p2")
    assert "p2; 3 of the last 3 groups failed" in str(world.failure)
    assert world.flow.dropped == {"reward failed": 3}


def test_groups_with_equal_rewards_count_among_those_that_did_not_fail() -> None:
    world = World(drop_zero_variance_groups=True)
    world.advance(0)
    for _ in range(14):
        for _ in range(99):
            world.score(next(iter(world.running)), (1.0, 1.0))
        world.fail(next(iter(world.running)))

    assert world.failure is None
    assert world.flow.dropped == {"all rewards equal": 1386, "reward failed": 14}
    assert any("2 of the last 200 groups failed, 10 of 200 may" in note for note in world.notes)


def test_a_token_that_breaks_the_bound_is_never_delivered() -> None:
    bound = StalenessBound(max_staleness=1, groups_per_step=2)

    bound.check([4, 5], 5, "group g")
    for step in (3, 6):
        with pytest.raises(
            RolloutError,
            match=r"group g has tokens from the weights after step .* 0 to 1 are allowed",
        ):
            bound.check([5, step], 5, "group g")


@pytest.mark.parametrize(
    "change", [{"max_staleness": -1}, {"groups_per_step": 0}, {"over_sampling": 0.9}]
)
def test_a_bound_that_no_batch_could_keep_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="impossible bound"):
        StalenessBound(**({"max_staleness": 0, "groups_per_step": 1} | change))


def test_versions_keep_their_step_and_newer_ones_are_of_now() -> None:
    versions = VersionSteps()
    versions.learn(7, 3)
    versions.learn(9, 4)
    versions.learn(7, 8)

    assert [versions.step_of(v) for v in (7, 9, 10)] == [3, 4, 8]
    with pytest.raises(RolloutError, match="version 8"):
        versions.step_of(8)


@pytest.mark.parametrize("is_leased", [False, True])
def test_before_the_ranks_ask_new_groups_wait_for_the_step_to_be_known(is_leased: bool) -> None:
    world = World(max_staleness=1, max_failed_share=1.0)
    groups = [world.training_group(order_idx) for order_idx in range(4)]
    for sample in groups[2].trajectories:
        sample.append_generated(np.ones(1, np.int32), np.zeros(1, np.float32), 100)
    world.learn(100, 0)
    leases = {0: groups[:2]} if is_leased else {}  # else the ranks may be publishing step 1
    recovered = Recovered(dict(enumerate(groups[2:], 2)), {}, leases, 4, 4, 0)

    world.flow.restore(recovered)
    world.flow.resume()
    assert list(world.running) == (ids(2, 3) if is_leased else ids(2))
    world.fail("p2")
    assert list(world.running) == (ids(3, 4) if is_leased else [])
    world.advance(1)
    assert list(world.running) == (ids(3, 4, 5, 6))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from(["in_order", "first_finished"]),
    st.sampled_from([1.0, 1.3, 2.0]),
    st.booleans(),
    st.data(),
)
def test_whatever_happens_the_bound_holds(
    max_staleness: int, batch_order: str, over_sampling: float, drops: bool, data: st.DataObject
) -> None:
    world = World(
        max_staleness=max_staleness,
        batch_order=batch_order,
        over_sampling=over_sampling,
        drop_zero_variance_groups=drops,
        max_failed_share=1.0,
    )
    trained: list[str] = []
    world.advance(0)
    for _ in range(data.draw(st.integers(1, 80), "moves")):
        moves: list[Callable[[], None]] = []
        if world.running:
            group_id = data.draw(st.sampled_from(list(world.running)), "group")
            moves += [
                partial(world.generate, group_id),
                partial(world.score, group_id, (0.0, 1.0)),
                partial(world.score, group_id, (1.0, 1.0)),
                partial(world.fail, group_id),
            ]
        batch = world.flow.take(world.step)
        if batch is None:
            if not moves:
                break
            data.draw(st.sampled_from(moves), "move")()
            continue
        for group in batch:
            for sample in group.trajectories:
                ages = world.step + 100 - sample.versions
                assert ((ages >= 0) & (ages <= max_staleness)).all()
        trained += [group.group_id for group in batch]
        for _ in range(data.draw(st.integers(0, 3), "meanwhile")):
            if world.running:  # while the ranks train, engines continue
                world.generate(data.draw(st.sampled_from(list(world.running))))
        world.learn(world.step + 101, world.step + 1)
        for _ in range(data.draw(st.integers(0, 4), "during an update")):
            if world.running:
                group_id = data.draw(st.sampled_from(list(world.running)))
                world.generate(group_id, is_updated=data.draw(st.booleans(), "is updated"))
                if data.draw(st.booleans(), "ends"):
                    world.score(group_id, (1.0, 1.0))  # another may be admitted in its place
        world.advance(world.step + 1)

    assert len(trained) == len(set(trained)), "none twice"
    assert len(trained) % 2 == 0
    if batch_order == "in_order" and over_sampling == 1.0:
        assert "too old" not in world.flow.dropped, "admission alone keeps the bound"
        order = [int(group_id[1:]) for group_id in trained]
        assert order == sorted(order)
    flow = world.flow.progress()
    assert flow["groups_admitted"] == (
        flow["groups_open"]
        + flow["groups_leased"]
        + flow["groups_trained"]
        + flow["groups_dropped"]
    ), "every group is somewhere"
