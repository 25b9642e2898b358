"""Agent loops that fail for every sample: the run ends and reports why and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from whole_runs import START_LIMIT_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]

BLOCKING = """
import time
def ask():
    time.sleep(3600)
async def run(ctx, sample):
    await ctx.generate(ctx.prompt_tokens, max_new_tokens=4)
    ask()
"""


@pytest.mark.parametrize(
    ("settings", "max_ends", "reason"),
    [
        (["rollout.max_failed_share=0.9"], 5, r"that ended \d processes in a row, for 3 prompts"),
        (["data.eval={train}"], 2, "for sample eval/"),
    ],
)
def test_a_loop_that_always_blocks_ends_the_run_after_a_few_processes(
    folder: Path, assets: Path, settings: list[str], max_ends: int, reason: str
) -> None:
    (folder / "blocking.py").write_text(BLOCKING)
    settings = [setting.format(train=assets / "train.jsonl") for setting in settings]
    blocking = ("rollout.agent=blocking:run", "rollout.block_limit_s=0.5")

    # Fewer loops at a time than prompts; otherwise each start could name another prompt.
    few = "rollout.agent_concurrency=2"
    with start_run(folder, *blocking, few, *settings, num_ranks=0) as run:
        ended = run.wait(START_LIMIT_S)

    ended.check_failed("did not yield for 0.5 s, at ", "/blocking.py:4 in ask: time.sleep(3600)")
    ended.check_failed("put blocking ones into asyncio.to_thread")
    assert re.search(reason, ended.error_of(0)), ended.error_of(0)
    notes = re.findall(r"worker-0#\d+ ends: user code .*/blocking.py:4 in ask", ended.output)
    assert 1 <= len(notes) <= max_ends, ended.output
