"""Agent loops and rewards that end or block their process cost their own group, and no other's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from live_rollouts import VOCAB_SIZE, LiveRollouts, ledger_of, merged
from rank_processes import poll

from umbra.runtime.cluster.run_events import RunEvent, read_events
from umbra.runtime.dash.sample_texts import open_ledger
from umbra.runtime.errors import RolloutError
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]

NUM_PROMPTS = 8
BAD_GROUP = "e0/p2"  # of prompt t3
LOOP_FAILED = "agent loop failed"
CONFIG: dict[str, Any] = {
    "max_failed_share": 0.5,
    "groups_per_step": NUM_PROMPTS,  # the next epoch's first takes the bad one's place
    "agent_timeout_s": 20.0,
    "vocab_size": VOCAB_SIZE,
}


def with_loop(
    session: Session, folder: Path, agent: str, max_worker_deaths: int = 3, **settings: Any
) -> LiveRollouts:
    """All groups of an epoch are in progress at the same time."""
    live = LiveRollouts(
        session,
        folder,
        agent=agent,
        reward="",
        config=CONFIG | {"max_worker_deaths": max_worker_deaths},
        num_prompts=NUM_PROMPTS,
        max_restarts=30,
        **settings,
    )
    live.publish(4)
    return live


def groups_of_next_batch(live: LiveRollouts) -> set[str]:
    """Those of the first epoch."""
    groups = {sample_id.rpartition("/")[0] for sample_id in merged(live.next_batch(0))}
    return {group for group in groups if group.startswith("e0/")}


def train_once(session: Session, folder: Path, agent: str, **settings: Any) -> set[str]:
    live = with_loop(session, folder, agent, **settings)
    groups = groups_of_next_batch(live)
    assert set(ledger_of(live).drop_reasons) == {LOOP_FAILED}
    return groups


def cause_of_the_drop(run_dir: Path, drop_reason: str = LOOP_FAILED) -> str:
    index = open_ledger(run_dir)
    found = index.find(f"{BAD_GROUP}/0")
    assert found is not None
    assert (str(found.state), found.drop_reason) == ("dropped", drop_reason)
    return str(index.story(found)[-1]["detail"])


def drops_in(run_dir: Path) -> list[RunEvent]:
    return [event for event in read_events(run_dir) if "is dropped" in event.text]


@pytest.mark.parametrize(("num_workers", "max_worker_deaths"), [(1, 2), (2, 3)])
def test_a_loop_that_kills_its_process_is_distinguished_from_those_beside_it(
    umbra_session: Session, tmp_path: Path, num_workers: int, max_worker_deaths: int
) -> None:
    live = with_loop(
        umbra_session,
        tmp_path,
        "kills_its_process_for_t3",
        max_worker_deaths,
        num_workers=num_workers,
    )

    groups = groups_of_next_batch(live)

    assert groups == {f"e0/p{idx}" for idx in range(NUM_PROMPTS)} - {BAD_GROUP}
    num_deaths = max_worker_deaths + 1
    assert f"saw {num_deaths} rollout workers die" in cause_of_the_drop(tmp_path)
    # Though each of the group's four loops kills its process.
    assert live.processes()["rewards-0"]["num_restarts"] == num_deaths or num_workers > 1


def test_what_a_killed_process_did_is_done_again_all_at_once(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = with_loop(umbra_session, tmp_path, "meets_7_others_twice")

    assert groups_of_next_batch(live) == {f"e0/p{idx}" for idx in range(NUM_PROMPTS)}
    assert live.processes()["rewards-0"]["num_restarts"] == 1


def test_a_loop_that_passes_something_else_than_tokens_gets_it_in_the_error(
    umbra_session: Session, tmp_path: Path
) -> None:
    groups = train_once(umbra_session, tmp_path, "gives_no_token_for_t3")

    assert groups == {f"e0/p{idx}" for idx in range(NUM_PROMPTS)} - {BAD_GROUP}
    cause = cause_of_the_drop(tmp_path)
    pattern = rf"RequestRefused: ({BAD_GROUP}/\d): token 64 at index \d+ is outside .* of 64 "
    refused = re.search(pattern, cause)  # of whichever sample's was answered first
    assert refused is not None
    where = r"user_agents.py:\d+ in gives_no_token_for_t3\)"
    assert re.search(rf"{where} for sample {refused[1]}[^;]*$", cause)


def test_a_loop_that_blocks_the_others_is_found_and_named(
    umbra_session: Session, tmp_path: Path
) -> None:
    groups = train_once(
        umbra_session, tmp_path, "gathers_what_blocks_for_t3", worker={"block_limit_s": 0.5}
    )

    assert groups == {f"e0/p{idx}" for idx in range(NUM_PROMPTS)} - {BAD_GROUP}
    cause = cause_of_the_drop(tmp_path)
    assert f"user code for sample {BAD_GROUP}/" in cause
    assert "did not yield for 0.5 s" in cause
    assert "user_agents.py:" in cause
    assert "in tool_that_blocks: time.sleep(60.0)" in cause


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("hangs_for_t3", "took longer than 2 s for samples e0/p2/0, e0/p2/1"),
        ("blocks_for_t3", "user code for sample e0/p2/0 did not yield for 1 s"),
    ],
)
def test_the_groups_that_wait_for_a_reward_that_hangs_are_scored_afterwards(
    umbra_session: Session,
    umbra_session_factory: SessionFactory,
    tmp_path: Path,
    reward: str,
    cause: str,
) -> None:
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        reward=reward,
        config=CONFIG | {"reward_timeout_s": 2.0},
        worker={"reward_timeout_s": 2.0},
        num_prompts=NUM_PROMPTS,
    )
    live.publish(4)

    groups = groups_of_next_batch(live)

    assert groups == {f"e0/p{idx}" for idx in range(NUM_PROMPTS)} - {BAD_GROUP}
    assert cause in cause_of_the_drop(tmp_path, "reward failed")
    (event,) = poll(lambda: drops_in(umbra_session_factory.run_dirs[0]), 1, "an event of the drop")
    assert event.who == "rollouts"
    assert f"group {BAD_GROUP} (prompt 't3') is dropped: " in event.text
    assert cause in event.text
    assert event.text in umbra_session_factory.notes


@pytest.mark.parametrize(
    ("agent", "what"),
    [
        ("stops_the_loop_for_t3", r"stopped the event loop .*user_agents.py:\d+ in stops_the"),
        ("cancels_all_tasks_for_t3", r"cancelled tasks .*user_agents.py:\d+ in cancels_all_t"),
        ("exits_in_a_task_for_t3", r"ended the event loop with SystemExit: enough \(.*in tool\)"),
    ],
)
def test_a_loop_that_ends_the_others_is_found_and_costs_none_of_them(
    umbra_session: Session, tmp_path: Path, agent: str, what: str
) -> None:
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        agent=agent,
        reward="",
        config=CONFIG | {"agent_retries": 0},  # one would hide what the others suffer
        num_prompts=NUM_PROMPTS,
        max_restarts=30,
    )
    live.publish(4)

    assert groups_of_next_batch(live) == {f"e0/p{idx}" for idx in range(NUM_PROMPTS)} - {BAD_GROUP}
    cause = cause_of_the_drop(tmp_path)
    assert re.search(f"user code for sample {BAD_GROUP}/. {what}", cause)


def test_each_evaluation_has_all_the_retries_of_a_prompt(
    umbra_session: Session, tmp_path: Path
) -> None:
    """Their prompts are the same ones, and so are the names of these."""
    live = with_loop(
        umbra_session,
        tmp_path,
        "blocks_the_first_of_two_times",
        worker={"block_limit_s": 0.5},
    )

    for step, num_tries in enumerate((2, 4)):
        live.evaluate(step)
        (tried,) = tmp_path.rglob("tried-for-t3")
        assert len(tried.read_text()) == num_tries


def test_code_that_blocks_whatever_it_is_given_ends_the_job_after_a_few_processes(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        reward="always_blocks",
        config=CONFIG | {"max_failed_share": 0.9},
        worker={"block_limit_s": 0.5},
        num_prompts=NUM_PROMPTS,
        max_restarts=30,
    )
    live.publish(4)

    with pytest.raises(RolloutError) as raised:
        live.next_batch(0)

    said = str(raised.value)
    place = r"user_rewards.py:\d+ in always_blocks: time.sleep\(60"
    assert re.search(rf"did not yield for 0.5 s, at .*{place}", said), said
    found = re.search(r"that ended (\d) processes in a row, for 3 prompts", said)
    assert found, said
    assert int(found[1]) <= 5
    assert live.processes()["rewards-0"]["incarnation"] <= 6


@pytest.mark.parametrize(
    ("agent", "message", "is_advised"),
    [
        ("raises", r"raised LookupError: the tool is gone \(.*", True),
        (
            "retokenises",
            r"differ from the trajectory at position 0 of 6: append each turn's tokens",
            False,
        ),
    ],
)
def test_a_failing_loop_fails_every_rank_and_to_catch_it_is_advised_where_it_helps(
    umbra_session: Session, tmp_path: Path, agent: str, message: str, is_advised: bool
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, agent=agent, reward="")
    live.publish(4)

    for failure in live.call_as_ranks(lambda rank: live.failure_of_next_batch(rank, 0)):
        assert re.search(message, str(failure)), failure
        assert ("catch what may fail inside the loop" in str(failure)) == is_advised
