"""The batches that a replay reads from an artificial ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_samples import admitted, runs_of

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_events import (
    Event,
    Finished,
    Leased,
    PromptGiven,
    RewardParts,
    Scored,
    Started,
    TeacherLogprobs,
    Version,
    encode_batches,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.rollout.rollout_config import BatchLayout
from umbra.trainer.replay.replay_run import LedgerBatches

ALL = uids_of(0, 1, 2, 3)
EVENTS: list[Event] = [
    Version(1, 0),
    admitted(0, "late", place=1),
    admitted(2, "early", place=0),
    Started(ALL),
    PromptGiven(1, np.asarray([7, 7, 7], np.int32)),
    runs_of((0, 0, 1, [11, 12]), (1, 0, 1, [13]), (2, 0, 1, [14]), (3, 0, 1, [15])),
    runs_of((1, 1, -1, [70]), (2, 1, 1, [16])),
    runs_of((1, 2, 1, [17])),
    Finished(ALL, ["stop", "stop", "length", "stop"]),
    RewardParts(ALL, ["exact"], np.asarray([5.0, 6.0, np.nan, 8.0])),
    Scored(ALL, np.asarray([0.5, 0.25, 0.0, 1.0])),
    Leased(0, ALL),
    Version(2, 1),
]


def write_run(folder: Path, events: list[Event]) -> Path:
    prompts: list[dict[str, Any]] = [
        {"id": name, "prompt": name, "tokens": np.asarray(tokens, "<i4").tobytes(), "row": {}}
        for name, tokens in (("late", [1, 2]), ("early", [3]))
    ]
    folder.mkdir(exist_ok=True)
    write_prompts(folder / "prompts.msgpack", prompts)
    with LedgerLog.open(ledger_folder(folder, "rollouts"), "job") as log:
        for event in events:
            log.write(encode_batches(0.0, [event]))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path, EVENTS)


def test_a_batch_has_what_the_ranks_were_given_in_the_order_of_the_data(run_dir: Path) -> None:
    layout = BatchLayout(mini_batches=2, mask_truncated=True)
    batches = LedgerBatches(run_dir, (), layout, world_size=1, has_teacher=False)

    batch = batches.batch(0, rank=0)

    assert batches.version(0) == 1
    assert batch.sample_ids == ["e0/early/0", "e0/early/1", "e0/late/0", "e0/late/1"]
    assert [batch.tokens[batch.span(idx)].tolist() for idx in range(4)] == [
        [3, 14, 16],
        [3, 15],
        [1, 2, 11, 12],
        [7, 7, 7, 13, 70, 17],
    ]
    masks = [batch.mask[batch.span(idx)].tolist() for idx in range(4)]
    assert masks == [[0, 0, 0], [0, 1], [0, 0, 1, 1], [0, 0, 0, 1, 0, 1]]
    logprobs = batch.columns["rollout_logprobs"]
    assert logprobs[batch.span(3)].tolist() == [0, 0, 0, -13, 0, -17]
    assert batch.groups.rewards.tolist() == [[0.0, 1.0, 0.5, 0.25]]
    assert [each.micro_batches for each in batch.mini_batches] == [[[0, 1]], [[2, 3]]]
    assert [each.num_tokens for each in batch.mini_batches] == [1, 4]
    assert batch.row["rollout/reward_mean"] == 0.4375


def test_ranks_share_a_batch_and_parts_of_rewards_are_compared_apart(run_dir: Path) -> None:
    batches = LedgerBatches(run_dir, ("exact",), BatchLayout(), world_size=2, has_teacher=False)

    parts = [batches.batch(0, rank) for rank in range(2)]

    assert sorted(name for part in parts for name in part.sample_ids) == sorted(
        ["e0/early/0", "e0/early/1", "e0/late/0", "e0/late/1"]
    )
    for part in parts:
        own = part.of_samples(part.groups.rewards[0])
        of_one = {"e0/late/0": 5.0, "e0/late/1": 6.0, "e0/early/0": np.nan, "e0/early/1": 8.0}
        expected = np.asarray([of_one[name] for name in part.sample_ids], np.float32)
        np.testing.assert_array_equal(own, expected)


def test_a_part_of_rewards_that_the_ledger_lacks_is_named(run_dir: Path) -> None:
    batches = LedgerBatches(
        run_dir, ("exact", "short"), BatchLayout(), world_size=1, has_teacher=False
    )

    with pytest.raises(ConfigError, match=r"the reward of e0/early/0 without the part 'short'"):
        batches.batch(0, rank=0)


def test_a_teachers_logprobs_come_with_the_samples_and_are_missed_without_one(
    tmp_path: Path,
) -> None:
    teacher = [
        TeacherLogprobs(uid, -np.arange(1, length + 1, dtype=np.float32))
        for uid, length in enumerate((2, 3, 2, 1))
    ]
    place = next(idx for idx, event in enumerate(EVENTS) if isinstance(event, RewardParts))
    distilled = write_run(tmp_path / "distilled", [*EVENTS[:place], *teacher, *EVENTS[place:]])
    plain = write_run(tmp_path / "plain", EVENTS)

    batches = LedgerBatches(distilled, (), BatchLayout(), world_size=1, has_teacher=True)
    batch = batches.batch(0, rank=0)
    without = LedgerBatches(plain, (), BatchLayout(), world_size=1, has_teacher=True)

    logprobs = batch.columns["teacher_logprobs"]
    assert logprobs[batch.span(3)].tolist() == [0, 0, 0, -1, -2, -3]  # of e0/late/1
    with pytest.raises(ConfigError, match=r"the ledger has no teacher's logprobs of e0/early/0"):
        without.batch(0, rank=0)
