from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_configs import rollout_config
from rollout_samples import arrays, make_trajectory

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.dispatch.trajectory import Group
from umbra.runtime.rollout.manager.admission import Admission
from umbra.runtime.rollout.manager.batch_answers import BatchAnswers, batch_metrics, rank_columns
from umbra.runtime.rollout.prompts import write_prompts


def two_groups() -> list[Group]:
    first = make_trajectory([1, 2], sample_id="g/0")
    first.append_generated(*arrays([10, 11], -0.5), 3)
    first.extend_context(np.asarray([1, 2, 10, 11, 90], np.int32))
    first.append_generated(*arrays([12], -0.25), 4)
    first.finish("stop")
    first.reward = 1.0
    second = make_trajectory([1, 2, 3], sample_id="h/0")
    second.append_generated(*arrays([20], -0.125), 4)
    second.finish("length")
    second.reward = 0.5
    return [Group("g", [first]), Group("h", [second])]


def test_columns_hold_every_token_with_its_origin() -> None:
    groups = two_groups()

    columns = rank_columns(groups, [0, 1])

    assert columns["offsets"].tolist() == [0, 6, 10]
    assert columns["prompt_lens"].tolist() == [2, 3]
    assert columns["tokens"].tolist() == [1, 2, 10, 11, 90, 12, 1, 2, 3, 20]
    assert columns["mask"].tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    assert columns["logprobs"].tolist() == [0, 0, -0.5, -0.5, 0, -0.25, 0, 0, 0, -0.125]
    assert columns["versions"].tolist() == [-1, -1, 3, 3, -1, 4, -1, -1, -1, 4]
    assert columns["rewards"].tolist() == [1.0, 0.5]
    assert "advantages" not in columns
    assert columns["group_ids"] == ["g", "h"]
    assert columns["sample_ids"] == ["g/0", "h/0"]
    assert columns["finish_reasons"] == ["stop", "length"]
    dtypes = {name: columns[name].dtype.name for name in ("tokens", "mask", "logprobs", "versions")}
    assert dtypes == {
        "tokens": "int32",
        "mask": "uint8",
        "logprobs": "float32",
        "versions": "int64",
    }


def test_teacher_logprobs_are_a_column_on_every_rank() -> None:
    groups = two_groups()
    groups[0].trajectories[0].teacher_logprobs = np.asarray([-1, -2, -9, -3], np.float32)
    groups[1].trajectories[0].teacher_logprobs = np.asarray([-4], np.float32)

    columns = rank_columns(groups, [0, 1])

    assert columns["teacher_logprobs"].tolist() == [0, 0, -1, -2, -9, -3, 0, 0, 0, -4]
    assert rank_columns(groups, [])["teacher_logprobs"].tolist() == []
    assert "teacher_logprobs" not in rank_columns(two_groups(), [0])


def test_a_rank_without_samples_gets_empty_columns() -> None:
    columns = rank_columns(two_groups(), [])

    assert columns["offsets"].tolist() == [0]
    assert columns["tokens"].dtype == np.int32
    assert columns["group_rewards"].tolist() == [[]]
    assert columns["group_offsets"].tolist() == [0]
    assert columns["reward_indices"].tolist() == []


def scored_groups(rewards: Sequence[Sequence[float]]) -> list[Group]:
    """Groups of samples of one token."""
    groups: list[Group] = []
    for group, of_group in enumerate(rewards):
        samples = [make_trajectory(sample_id=f"g{group}/{idx}") for idx in range(len(of_group))]
        for sample, reward in zip(samples, of_group, strict=True):
            sample.append_generated(*arrays([7]), 0)
            sample.finish("stop")
            sample.reward = reward
        groups.append(Group(f"g{group}", samples))
    return groups


def test_a_sample_brings_the_rewards_of_its_whole_group_also_where_ranks_share_it() -> None:
    groups = scored_groups([[0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0]])

    first = rank_columns(groups, [0, 2, 6])
    second = rank_columns(groups, [1, 3, 4, 5, 7])

    assert first["group_rewards"].tolist() == [[0, 1, 2, 5, 6, 7]]
    assert first["group_offsets"].tolist() == [0, 3, 6]
    assert first["reward_indices"].tolist() == [0, 2, 4]
    assert second["group_rewards"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert second["group_offsets"].tolist() == [0, 3, 5, 8]
    assert second["reward_indices"].tolist() == [1, 3, 4, 5, 7]
    for columns in (first, second):
        own = columns["group_rewards"][0, columns["reward_indices"]]
        assert own.tolist() == columns["rewards"].tolist()
        dtypes = {name: columns[name].dtype.name for name in ("group_rewards", "reward_indices")}
        assert dtypes == {"group_rewards": "float32", "reward_indices": "int32"}


def test_a_mini_batch_has_whole_groups_of_which_each_rank_has_its_part() -> None:
    groups = scored_groups([[0.0] * 4, [1.0] * 4, [2.0] * 4, [3.0] * 4])
    groups[2].trajectories[0].append_generated(*arrays([8, 9]), 0)
    config = rollout_config(groups_per_step=4, group_size=4, world_size=2, mini_batches=2)
    answers = BatchAnswers(groups, config.layout, config.world_size, {})

    found: list[list[str]] = [[], []]
    for rank in range(2):
        columns = answers.of(rank)
        assert [each[1:] for each in columns["mini_batches"]] == [[8, 8], [10, 8]]
        for samples, (micro_batches, *_) in zip(found, columns["mini_batches"], strict=True):
            samples += [columns["sample_ids"][idx] for one in micro_batches for idx in one]

    assert [sorted(samples) for samples in found] == [
        [f"g{group}/{idx}" for group in pair for idx in range(4)] for pair in ((0, 1), (2, 3))
    ]


def test_truncated_completions_can_be_left_out_of_the_loss() -> None:
    config = rollout_config(group_size=1, mask_truncated=True)

    columns = BatchAnswers(two_groups(), config.layout, config.world_size, {}).of(0)

    assert columns["mask"].tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 0]
    assert columns["mini_batches"] == [[[[0, 1]], 3, 2]]
    assert columns["group_rewards"].tolist() == [[1.0, 0.5]]


def test_metrics_are_of_the_whole_batch() -> None:
    metrics = batch_metrics(two_groups())

    assert metrics["reward_mean"] == 0.75
    assert metrics["tokens"] == 4
    assert metrics["truncated_share"] == 0.5
    assert metrics["segments_per_trajectory"] == 1.5
    assert (metrics["version_min"], metrics["version_max"]) == (3, 4)
    assert metrics["zero_variance_groups"] == 2


def test_a_batch_without_a_generated_token_has_no_versions() -> None:
    sample = make_trajectory([1, 2])
    sample.finish("stop")
    sample.reward = 1.0

    metrics = batch_metrics([Group("g", [sample])])

    assert [name for name in metrics if name.startswith("version")] == []


def test_parts_of_rewards_are_averaged_where_they_apply() -> None:
    groups = two_groups()
    first, second = (sample for group in groups for sample in group.trajectories)
    first.reward_parts = {"exact": 1.0, "length": math.nan, "never": math.nan}
    second.reward_parts = {"exact": 0.0, "length": -0.5, "never": math.nan}

    metrics = batch_metrics(groups)

    means = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert means == {"reward/exact_mean": 0.5, "reward/length_mean": -0.5}


def make_admission(folder: Path, *, max_context_len: int = 64, **settings: Any) -> Admission:
    path = folder / "prompts.msgpack"
    records: list[dict[str, Any]] = [
        {
            "id": f"p{i}",
            "prompt": f"{i}",
            "tokens": np.arange(i + 1, dtype="<i4").tobytes(),
            "row": {},
        }
        for i in range(5)
    ]
    write_prompts(path, records)
    config = rollout_config(
        prompts_path=str(path),
        eval_path=str(path),
        **settings,
        groups_per_step=3,
        max_new_tokens=8,
        max_context_len=max_context_len,
    )
    return Admission(config)


def test_a_training_group_knows_the_parts_that_its_advantages_compare(tmp_path: Path) -> None:
    admission = make_admission(tmp_path, reward_parts=("exact", "short"))

    assert admission.training_group(0).parts == ("exact", "short")
    assert [group.parts for group in admission.evaluation_groups()] == [()]


def groups_of(admission: Admission, step: int) -> list[Group]:
    """Those of a step of three groups."""
    return [admission.training_group(place) for place in range(3 * step, 3 * step + 3)]


def test_steps_go_through_the_epochs_whichever_step_comes_first(tmp_path: Path) -> None:
    admission = make_admission(tmp_path)

    ids = [group.group_id for step in range(5) for group in groups_of(admission, step)]

    assert len(set(ids)) == 15
    assert sorted(i for i in ids if i.startswith("e1/")) == [f"e1/p{i}" for i in range(5)]
    later = make_admission(tmp_path)
    assert [group.group_id for group in groups_of(later, 3)] == ids[9:12]
    seeds = {s.seed for step in range(5) for g in groups_of(admission, step)
             for s in g.trajectories}  # fmt: skip
    assert len(seeds) == 30
    admission.close()
    later.close()


def test_every_held_out_prompt_is_used_once(tmp_path: Path) -> None:
    admission = make_admission(tmp_path)

    samples = [s for group in admission.evaluation_groups() for s in group.trajectories]

    assert [sample.sample_id for sample in samples] == [f"eval/p{i}" for i in range(5)]
    admission.close()


def test_samples_of_a_held_out_prompt_differ_in_their_seeds(tmp_path: Path) -> None:
    admission = make_admission(tmp_path, eval_samples=2)

    samples = [s for group in admission.evaluation_groups() for s in group.trajectories]

    assert [sample.sample_id for sample in samples[:3]] == ["eval/p0/0", "eval/p0/1", "eval/p1/0"]
    assert len({sample.seed for sample in samples}) == len(samples) == 10
    admission.close()


def test_held_out_prompts_may_have_a_budget_of_their_own(tmp_path: Path) -> None:
    admission = make_admission(tmp_path, eval_max_new_tokens=3)

    (group,) = admission.evaluation_groups()

    assert {sample.budget for sample in group.trajectories} == {3}
    assert {s.budget for s in admission.training_group(0).trajectories} == {8}
    admission.close()


def test_a_prompt_without_room_for_a_completion_is_named(tmp_path: Path) -> None:
    admission = make_admission(tmp_path, max_context_len=5)

    with pytest.raises(DataError, match=r"prompt 'p4' has 5 tokens, .* in a context of 5: drop"):
        groups_of(admission, 1)

    admission.close()


def in_parts(*exact_and_length: tuple[float, float]) -> Group:
    """A group that compares these two parts of rewards, whose sum is always 1."""
    samples = scored_groups([[1.0] * len(exact_and_length)])[0].trajectories
    for sample, (exact, length) in zip(samples, exact_and_length, strict=True):
        sample.reward_parts = {"length": length, "logged": 9.0, "exact": exact}
    return Group("g", samples, 0, parts=("exact", "length"))


def test_parts_that_are_compared_apart_reach_every_rank_of_a_group() -> None:
    groups = [in_parts((1.0, 0.0), (0.0, math.nan)), in_parts((0.25, 0.75))]

    columns = rank_columns(groups, [1])

    assert str(columns["group_rewards"].tolist()) == "[[1.0, 0.0], [0.0, nan]]"
    assert columns["group_rewards"].dtype == np.float32
    assert rank_columns(groups, [])["group_rewards"].shape == (2, 0)


def test_equal_sums_of_different_parts_are_worth_a_comparison() -> None:
    groups = [in_parts((1.0, 0.0), (0.0, 1.0)), in_parts((1.0, 0.0), (1.0, math.nan))]

    assert [group.has_zero_variance for group in groups] == [False, True]
    assert batch_metrics(groups)["zero_variance_groups"] == 1
