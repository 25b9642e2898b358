"""Rewards and agent loops that cannot be used: the error names function, cause and remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from whole_runs import BAD_INPUT_LIMIT_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_every_rank_reports_what_the_reward_raised_and_where(folder: Path) -> None:
    with start_run(folder, "reward.function=failing_rewards:raises") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "RewardError: reward function failing_rewards:raises raised ValueError: no digit",
        "failing_rewards.py:",
        "let it return a number",
    )
    by_torchrun = ended.output[ended.output.index("Root Cause (first observed failure)") :]
    assert "RewardError: reward function failing_rewards:raises" in by_torchrun


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "reward.function=failing_rewards:raises_for_5",
            ["RewardError: the evaluation after step 0 failed", "raised ValueError: no digit"],
        ),
        (
            "rollout.agent=failing_rewards:loop_that_fails_for_3_and_5",
            ["RolloutError: the evaluation after step 0 failed", "raised ValueError: no tool for"],
        ),
    ],
)
def test_a_failed_evaluation_is_named_with_the_log_that_has_more(
    folder: Path, assets: Path, setting: str, words: list[str]
) -> None:
    held_out = f"data.eval={assets}/train.jsonl"

    with start_run(folder, setting, held_out, "rollout.max_failed_share=0.9", num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(*words, "for sample", "eval/", "logs/rollouts.log has the earlier failures")
    assert "the evaluation after step 0 failed" in (run.run_dir / "logs/rollouts.log").read_text()


def test_steps_without_a_token_of_the_policy_are_warned_of_once(folder: Path) -> None:
    loop = "failing_rewards:loop_that_never_generates"

    with start_run(folder, f"rollout.agent={loop}", "train.steps=3", num_ranks=0) as run:
        ended = run.wait()

    assert ended.status == 0, ended.output
    assert "step 3/3 " in ended.output
    said = "step 1 trained on nothing: the policy generated no token in any of its 8 completions"
    assert ended.output.count("trained on nothing") == 1, ended.output
    assert f"{said}; check that rollout.agent {loop} awaits ctx.generate" in ended.output


def test_a_function_that_cannot_be_imported_ends_the_run_before_an_engine_starts(
    folder: Path,
) -> None:
    (folder / "needy.py").write_text("import no_such_module\n\ndef reward(**columns): ...\n")

    with start_run(folder, "reward.function=needy:reward", num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "ConfigError: reward.function 'needy:reward': importing 'needy' raised ",
        "No module named 'no_such_module'",
        "name its folder in reward.python_path",
    )
    assert not (run.run_dir / "logs/policy-0.log").exists()


def test_a_reward_that_ends_its_process_each_time_is_named_as_the_cause(folder: Path) -> None:
    with start_run(folder, "reward.function=failing_rewards:exits", num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("the reward of group e0/", "saw 4 rollout workers die")
    note = r"worker-0#1 \(pid \d+\) exited with status 3; restarting it in [\d.]+ s$"
    assert re.search(note, ended.output, re.MULTILINE), ended.output


BLOCKING = """
import time
def ask():
    time.sleep(3600)
async def run(ctx, sample):
    await ctx.generate(ctx.prompt_tokens, max_new_tokens=4)
    ask()
"""


def test_a_loop_that_blocks_the_evaluation_ends_the_run_after_two_processes(
    folder: Path, assets: Path
) -> None:
    (folder / "blocking.py").write_text(BLOCKING)
    settings = ("rollout.agent=blocking:run", "rollout.block_limit_s=0.5")
    # Fewer loops at a time than prompts; otherwise each start could name another prompt.
    settings += ("rollout.agent_concurrency=2", f"data.eval={assets}/train.jsonl")
    with start_run(folder, *settings, num_ranks=0) as run:
        ended = run.wait()

    ended.check_failed("did not yield for 0.5 s, at ", "/blocking.py:4 in ask: time.sleep(3600)")
    ended.check_failed("put blocking ones into asyncio.to_thread", "for sample eval/")
    notes = re.findall(r"worker-0#\d+ ends: user code .*/blocking.py:4 in ask", ended.output)
    assert 1 <= len(notes) <= 2, ended.output
