from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
import user_rewards

from umbra.runtime.errors import RewardError
from umbra.runtime.rollout.agents.reward_function import RewardFunction, RewardSum, Scores
from umbra.runtime.rollout.agents.user_thread import Broken, UserThread

IDS = ["e0/p/0", "e0/p/1"]


def score(
    name: str,
    rows: Sequence[dict[str, Any]] = ({"answer": "x"}, {"answer": "yy"}),
    timeout_s: float = 5.0,
    ids: Sequence[str] = IDS,
) -> list[float]:
    async def main() -> list[float]:
        async with UserThread("user") as thread:
            reward = RewardFunction(f"user_rewards:{name}", thread, timeout_s)
            return await reward(ids, ["p", "p"], ["x", "yyy"], rows)

    return asyncio.run(main())


def test_rewards_are_numbers_in_order() -> None:
    assert score("length") == [1.0, 3.0]
    assert score("slow_judge") == [1.0, 1.0]
    assert score("of_numpy") == [0.5, 1.0]
    assert score("of_torch") == [0.5, 0.5]


def test_only_the_columns_that_a_function_takes_are_given() -> None:
    rows = [{"answer": "x", "extra": 1, "prompts": "?"}, {"answer": "z"}]

    assert score("wants_answer", rows) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised KeyError: 'no such answer' \(.*user_rewards.py:\d+ in raises\)"),
        ("exits", "raised SystemExit: enough"),
        ("reaches_a_limit", r"raised .*LimitReached: too slow \(.*in reaches_a_limit\)"),
        ("reaches_a_limit_later", r"raised .*LimitReached: too slow \(.*in \w+_later\)"),
        ("interrupts", r"raised KeyboardInterrupt \(.*in interrupts\)"),
        ("stops", r"raised StopIteration: \(.*user_rewards.py:\d+ in stops\)"),
        ("awaits_what_is_cancelled", r"awaited what its own code, .* \(.*in \w+_cancelled\)"),
        ("runs_what_is_cancelled", r"awaited what its own code, .* \(.*in \w+_cancelled\)"),
        ("gets_what_is_cancelled", r"awaited what its own code, .* \(.*in \w+_cancelled\)"),
        ("awaits_what_an_executor_has_cancelled", r"awaited what .* \(.*in \w+_cancelled\)"),
        ("nan_for_the_last", "returned nan for sample e0/p/1; rewards must be finite"),
        ("nothing_for_the_first", "returned None for sample e0/p/0"),
        ("texts", "returned '1.0' for sample e0/p/0; rewards must be finite numbers"),
        ("texts_of_numpy", r"returned np.str_\('1.0'\) for sample e0/p/0; rewards must be"),
        ("one_text", "returned '1' for sample e0/p/0; rewards must be finite numbers"),
        (
            "huge",
            r"returned -1e\+300 for sample e0/p/1; rewards must lie within 1.701e\+38 of zero",
        ),
        ("huge_int", "returned a number beyond 1.8e308 for sample e0/p/0; rewards must lie within"),
        ("too_few", "returned 1 rewards for 2 completions"),
        ("a_number", "returned float for samples e0/p/0, e0/p/1; return a list"),
    ],
)
def test_a_bad_reward_is_explained(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        score(name)

    assert f"reward function user_rewards:{name}" in str(caught.value)


@pytest.mark.parametrize(("name", "advice"), [("raises", True), ("misspells", False)])
def test_to_return_a_number_is_advised_where_that_helps(name: str, advice: bool) -> None:
    with pytest.raises(RewardError, match=r"raised .* for samples e0/p/0, e0/p/1") as caught:
        score(name)

    assert ("let it return a number (such as 0.0)" in str(caught.value)) is advice


def test_a_full_disk_is_no_fault_of_the_samples() -> None:
    said = (
        r"raised OSError: .*No space left.* \(.*user_rewards.py:\d+ in writes_.*\) for samples .*"
    )
    with pytest.raises(RewardError, match=said + "; the disk .* is full: free some spac") as caught:
        score("writes_to_a_full_disk")

    assert "let it return a number" not in str(caught.value)


FACTS: dict[str, list[Any]] = {"num_tokens": [1, 9], "finish_reason": ["stop", "length"]}


def add_up(
    functions: dict[str, str], weights: dict[str, float], rows: Sequence[dict[str, Any]] = ({}, {})
) -> Scores:
    async def main() -> Scores:
        async with UserThread("user") as thread:
            loaded = {
                name: RewardFunction(f"user_rewards:{function}", thread, 5.0, may_skip=True)
                for name, function in functions.items()
            }
            return await RewardSum(loaded, weights)(IDS, ["p", "p"], ["x", "yyy"], rows, FACTS)

    return asyncio.run(main())


def test_rewards_add_up_by_weight_where_they_apply() -> None:
    rewards, parts = add_up(
        {"length": "length", "second": "nothing_for_the_first", "judge": "slow_judge"},
        {"length": 0.5, "second": 3.0},
    )

    assert rewards == [0.5 + 1.0, 1.5 + 0.0 + 1.0]
    assert {name: str(values) for name, values in parts.items()} == {
        "length": "[1.0, 3.0]",
        "second": "[nan, 0.0]",
        "judge": "[1.0, 1.0]",
    }


def test_a_function_that_changes_its_arguments_changes_those_of_no_other() -> None:
    rewards, _ = add_up({"first": "empties_its_lists", "second": "length"}, {})

    assert rewards == [1.0, 3.0]


def test_a_sample_to_which_nothing_applies_gets_0(caplog: pytest.LogCaptureFixture) -> None:
    rewards, _ = add_up({"second": "nothing_for_the_first"}, {})

    assert rewards == [0.0, 0.0]
    assert "none of second applies to some samples: their reward is 0" in caplog.text


def test_a_sum_that_is_too_large_is_refused() -> None:
    with pytest.raises(RewardError, match=r"weighted sum of length is 2e.38 for sample e0/p/0"):
        add_up({"length": "length"}, {"length": 2e38})


@pytest.mark.parametrize("name", ["punishes_length", "punishes_length_by_columns"])
def test_a_reward_sees_the_number_of_tokens_and_the_end(name: str) -> None:
    rewards, _ = add_up({"": name}, {})

    assert rewards == [-1.0, -109.0]


def test_a_column_with_the_name_of_a_fact_is_named_where_it_is_taken() -> None:
    rows = [{"num_tokens": 3}, {"num_tokens": 4}]

    with pytest.raises(RewardError, match=r"takes \['num_tokens'\], which umbra has .*: rename"):
        add_up({"": "punishes_length"}, {}, rows)
    assert add_up({"": "punishes_length_by_columns"}, {}, rows).rewards == [-3.0, -104.0]


@pytest.mark.parametrize("name", ["wants_answer", "wants_answer_among_others"])
def test_a_column_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(RewardError, match=r"takes \['answer'\], which the data set lacks"):
        score(name, [{"solution": "x"}, {"solution": "y"}])


async def why_broken(name: str) -> Broken:
    """The report of the thread about a call that does not return."""
    async with UserThread("user") as thread, asyncio.TaskGroup() as tasks:
        reward = RewardFunction(f"user_rewards:{name}", thread, 0.05)
        call = tasks.create_task(reward(IDS, ["p", "p"], ["x", "yyy"], [{}, {}]))
        broken = await thread.broken(5.0, "a limit")
        call.cancel()
        user_rewards.hang_is_over.set()
        return broken


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hangs", "hangs_lazily"])
def test_a_reward_that_hangs_is_found_with_its_place(name: str) -> None:
    user_rewards.hang_is_over.clear()

    label, reason = asyncio.run(why_broken(name))

    assert label == IDS[0]
    assert "took longer than 0.05 s for samples e0/p/0, e0/p/1: it is at /" in reason
    assert re.search(r"user_rewards.py:\d+ in .*hang_is_over.wait.*; make it faster", reason)


async def why_ended() -> Broken:
    """The report of the thread about a call with a task that exits."""

    loops: list[asyncio.AbstractEventLoop] = []

    async def exits() -> None:
        raise SystemExit("enough")

    async def call() -> None:
        loops.append(asyncio.get_running_loop())
        await asyncio.gather(exits())

    async with UserThread("user") as thread, asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(thread.run_async(call, IDS[0]))
        broken = await thread.broken(5.0, "a limit")
        while not loops[0].is_closed():  # noqa: ASYNC110  it notifies nobody
            await asyncio.sleep(0.01)
        calling.cancel()
        return broken


def test_a_loop_that_user_code_has_ended_can_be_left_with_the_cause() -> None:
    label, reason = asyncio.run(why_ended())

    assert label == IDS[0]
    assert "ended the event loop with SystemExit: enough" in reason


def test_lazy_results_are_read_like_lists_and_only_as_far_as_needed() -> None:
    assert score("lazy") == [1.0, 3.0]

    with pytest.raises(RewardError, match="returned more rewards for 2 completions"):
        score("endless")
    with pytest.raises(RewardError, match=r"for 5 completions \(samples 0, 1, 2, 3 and 1 more\)"):
        score("endless", ids="01234")
    with pytest.raises(RewardError, match=r"raised KeyError: 'late' \(.*user_rewards.py:\d+ in "):
        score("raises_lazily")
