"""A manager's ledger always replays to the manager's state."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from recorded_story import Story

NUM_SEEDS = 60
NUM_MOVES = 300


async def live(story: Story) -> None:
    await story.begin()
    try:
        for number in range(NUM_MOVES):
            await story.move()
            if number % 20 == 0 or story.moves[-1:] == ["the manager is killed"]:
                await story.check()
        story.is_calm = True
        goal = story.step + 2
        for _ in range(3000):
            if story.step == goal:
                break
            await story.move()
        assert story.step == goal, "it does not get on"
        await story.check()
    finally:
        await story.life.end()


def _no_sync(_descriptor: int) -> None:
    """No machine goes down here, and it takes most of the time."""


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 20))
def test_what_is_recorded_is_what_is_there(
    first_seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _no_sync)
    with asyncio.Runner() as runner:
        for seed in range(first_seed, first_seed + 20):
            story = Story(seed, tmp_path / str(seed))
            try:
                runner.run(live(story))
            except BaseException:
                print(f"seed {seed}, {story.config}", *story.moves, sep="\n")
                raise
