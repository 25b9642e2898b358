"""The account of a chaos run finds what is wrong, and nothing where all is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chaos_account import VIOLATIONS, Account, find_flaw
from chaos_oracle import Oracle
from chaos_plan import ChaosPlan
from chaos_saboteur import DeathNotes

from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Finished,
    Leased,
    Scored,
    Started,
    Tokens,
    Version,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_state import LedgerState

STEP = 3


def make_plan(**changes: Any) -> ChaosPlan:
    sizes: dict[str, Any] = {"trajectories": 72, "kills": 20, "updates": 6, "group_size": 4}
    return ChaosPlan.of_size(**{"seed": 5, **sizes, **changes})


PLAN = make_plan()
ORACLE = Oracle(PLAN)
Columns = dict[str, Any]


def right_answer(step: int = STEP) -> Columns:
    """A batch as it should come, made one and two steps before: all on one rank."""
    samples = ORACLE.batch(step)
    columns: Columns = {
        name: []
        for name in ("tokens", "logprobs", "versions", "prompt_lens", "rewards", "group_ids")
    }
    columns |= {"offsets": [0], "sample_ids": list(samples), "finish_reasons": []}
    for sample in samples.values():
        num_tokens, num_given = len(sample.tokens), len(sample.prompt)
        old, new = ORACLE.versions[step - 2], ORACLE.versions[step - 1]
        versions = np.where(np.arange(num_tokens) < num_tokens // 2, old, new)
        logprobs = np.where(
            versions == old,
            ORACLE.logprobs(old, sample.keys),
            ORACLE.logprobs(new, sample.keys),
        )
        columns["tokens"] += [*sample.prompt, *sample.tokens]
        columns["versions"] += [*[-1] * num_given, *versions]
        columns["logprobs"] += [*[0.0] * num_given, *logprobs]
        columns["offsets"].append(len(columns["tokens"]))
        columns["prompt_lens"].append(num_given)
        columns["rewards"].append(sample.reward)
        columns["group_ids"].append(sample.group_id)
        columns["finish_reasons"].append(sample.finish_reason)
    types = {"tokens": "i4", "logprobs": "f4", "versions": "i8", "offsets": "i4"}
    types |= {"prompt_lens": "i4", "rewards": "f4"}
    return columns | {name: np.array(columns[name], kind) for name, kind in types.items()}


def account_of(answer: Columns, step: int = STEP) -> Account:
    account = Account(PLAN, ORACLE)
    account.observe(step, [answer])
    return account


def first_token(answer: Columns) -> int:
    """Where the first sample's completion begins."""
    return int(answer["prompt_lens"][0])


def test_a_right_batch_has_no_problems() -> None:
    account = account_of(right_answer())

    assert account.problems() == []
    assert account.counts == dict.fromkeys(VIOLATIONS, 0)
    assert account.num_trajectories == len(ORACLE.batch(STEP)) == 12
    assert set(account.ages) == {1, 2}
    assert account.num_resumed > 0
    assert sum(account.ages.values()) == account.num_tokens


def wrong_token(answer: Columns) -> None:
    answer["tokens"][first_token(answer)] ^= 1


def logprob_of_another_token(answer: Columns) -> None:
    first = first_token(answer)
    answer["logprobs"][first + 1] = answer["logprobs"][first]


def wrong_label(answer: Columns) -> None:
    answer["versions"][first_token(answer)] = ORACLE.versions[STEP - 1]


def unknown_version(answer: Columns) -> None:
    answer["versions"][first_token(answer)] = ORACLE.versions[-1] + 1


def swapped_rewards(answer: Columns) -> None:
    answer["rewards"][:2] = answer["rewards"][1::-1].copy()


def wrong_finish(answer: Columns) -> None:
    answer["finish_reasons"][0] = "abort"


def other_group(answer: Columns) -> None:
    answer["group_ids"][0] = answer["group_ids"][-1]


def stranger(answer: Columns) -> None:
    answer["sample_ids"][0] = "e0/nobody/0"


def twice(answer: Columns) -> None:
    answer["sample_ids"][1] = answer["sample_ids"][0]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (wrong_token, {"wrong_tokens": 1}),
        (logprob_of_another_token, {"wrong_logprobs": 1}),
        (wrong_label, {"wrong_version": 1, "versions_going_back": 1}),
        (unknown_version, {"wrong_version": 1, "versions_going_back": 1}),
        (swapped_rewards, {"wrong_rewards": 2}),
        (wrong_finish, {"wrong_finishes": 1}),
        (other_group, {"broken_groups": 1}),
        (stranger, {"strangers": 1, "lost": 1, "broken_groups": 1}),
        (twice, {"duplicated": 1, "lost": 1, "broken_groups": 1}),
    ],
)
def test_what_is_wrong_is_counted(
    spoil: Callable[[Columns], None], expected: dict[str, int]
) -> None:
    answer = right_answer()
    spoil(answer)

    account = account_of(answer)

    assert {name: count for name, count in account.counts.items() if count} == expected
    assert len(account.problems()) == len(expected)


@pytest.mark.parametrize(
    ("got", "flaw"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], None),
        ([1, 2, 4, 5, 6, 7, 8], ("lost_tokens", 2, 1)),
        ([1, 2, 6, 7, 8], ("lost_tokens", 2, 3)),
        ([1, 2, 3, 4, 5, 6], ("lost_tokens", 6, 2)),
        ([3, 4, 5, 6, 7, 8, 0, 0], ("lost_tokens", 0, 2)),
        ([1, 2, 1, 2, 3, 4, 5, 6], ("repeated_tokens", 2, 2)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 8], ("repeated_tokens", 8, 1)),
        ([1, 2, 9, 9, 9, 9, 9, 9], ("wrong_tokens", 2, 6)),
        ([1, 2, 3, 4, 5, 9, 7, 8], ("wrong_tokens", 5, 1)),
        ([1, 2, 9, 8], ("wrong_tokens", 2, 6)),
        ([], ("lost_tokens", 0, 8)),
    ],
)
def test_a_flaw_is_told_by_what_follows_it(
    got: list[int], flaw: tuple[str, int, int] | None
) -> None:
    expected = np.arange(1, 9, dtype=np.int32)

    assert find_flaw(np.array(got, np.int32), expected) == flaw


@pytest.mark.parametrize(("step", "ages"), [(1, "0 to 0"), (5, "3 to 4"), (0, "-1 to -1")])
def test_an_age_outside_the_bound_is_a_problem(step: int, ages: str) -> None:
    account = Account(PLAN, ORACLE)
    made_at = {1: (1, 1), 5: (1, 2), 0: (1, 1)}[step]
    versions = np.array([ORACLE.versions[at] for at in made_at])

    account._age(step, versions)  # pyright: ignore[reportPrivateUsage]

    expected = [] if step == 1 else [f"tokens are {ages} steps old: 0 to 2"]
    assert account.problems() == expected


SINGLES = make_plan(trajectories=18, group_size=1)
SINGLE_ORACLE = Oracle(SINGLES)


@pytest.mark.parametrize(
    ("flaw", "text"),
    [
        ("", ""),
        ("not leased", "is scored for None"),
        ("of another step", "is leased for 6"),
        ("another token", "has 1 wrong tokens"),
        ("not there", "is not there"),
    ],
)
def test_a_ledger_that_says_something_else_is_found(flaw: str, text: str) -> None:
    ledger = LedgerState()
    ledger.apply(Version(1, 0))
    for step in range(5):
        record_batch(ledger, step, "")
    record_batch(ledger, 5, flaw)

    account = Account(SINGLES, SINGLE_ORACLE)
    account.observe_ledger(ledger)

    first = next(iter(SINGLE_ORACLE.batch(5)))
    assert account.counts["wrong_in_ledger"] == (1 if flaw else 0)
    if flaw:
        (problem,) = account.problems()
        assert f"{first}, of batch 5, {text}" in problem


def record_batch(ledger: LedgerState, step: int, flaw: str) -> None:
    """What a manager writes about a batch of groups of one, with a flaw in its first."""
    samples = list(SINGLE_ORACLE.batch(step).items())
    for idx, (sample_id, sample) in enumerate(samples):
        flaw = flaw if idx == 0 else ""
        if flaw == "not there":
            continue
        uids, tokens = uids_of(ledger.next_uid), sample.tokens.copy()
        tokens[0] ^= flaw == "another token"
        group_id, place = sample_id.rpartition("/")[0], step * len(samples) + idx
        ledger.apply(Admitted(int(uids[0]), group_id, "p", 0, place, np.zeros(1, np.int64)))
        ledger.apply(Started(uids))
        starts, offsets = np.zeros(1, np.int64), np.array([0, len(tokens)])
        logprobs = np.zeros(len(tokens), np.float32)
        ledger.apply(Tokens(uids, starts, offsets, np.ones(1, np.int64), tokens, logprobs))
        ledger.apply(Finished(uids, ["stop"]))
        ledger.apply(Scored(uids, np.ones(1)))
        if flaw != "not leased":
            ledger.apply(Leased(step + (flaw == "of another step"), uids))


def test_every_batch_has_groups_of_its_own() -> None:
    ids = [sample_id for step in range(PLAN.num_updates) for sample_id in ORACLE.batch(step)]

    assert len(ids) == len(set(ids)) == PLAN.num_trajectories
    assert len({sample_id.partition("/")[0] for sample_id in ids}) > 1, "several epochs"


@pytest.mark.parametrize(
    ("note", "label", "is_crash"),
    [
        ("policy-0#3 (pid 7) killed by SIGKILL (9); restarting it in 0.05 s", "policy-0#3", False),
        (
            "policy-1#2 was killed: it was stopped by a signal: no heartbeat for 2.5 s; "
            "restarting it in 0.2 s",
            "policy-1#2",
            False,
        ),
        (
            "policy-1#2 failed to start: policy-1#2 (pid 7) killed by SIGKILL (9); restarting it "
            "in 0.2 s",
            "policy-1#2",
            False,
        ),
        ("policy-1#2 (pid 7) exited with status 1; restarting it in 0.2 s", "policy-1#2", True),
        ("policy-1#2 serves again, version 7", None, False),
    ],
)
def test_deaths_are_read_from_the_supervisor_s_notes(
    note: str, label: str | None, is_crash: bool
) -> None:
    deaths = DeathNotes()

    deaths.observe(note)

    assert list(deaths.how) == ([label] if label else [])
    assert bool(deaths.crashes()) == is_crash
