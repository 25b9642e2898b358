"""Points in a training run at which a test can hold it.

    places = HeldPlaces(folder)              HELD_IN=folder in the run's environment
    places.hold("batch")                     the next caller of await_release("batch") waits
    run.wait_for("it", lambda: places.is_reached("batch") or None, 30.0)
    places.release("batch")

`torchrun -m held_places CONFIG ...` runs a training whose ranks can be held in their step ("step").
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine

_POLL_S = 0.02


class HeldPlaces:
    """A file for each point that is held, and one beside it once the point was reached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    @classmethod
    def of_this_run(cls) -> HeldPlaces:
        return cls(Path(os.environ["HELD_IN"]))

    def hold(self, place: str) -> None:
        (self._folder / place).touch()

    def release(self, place: str) -> None:
        (self._folder / place).unlink()

    def is_reached(self, place: str) -> bool:
        return (self._folder / f"{place}.reached").exists()

    def keeps(self, place: str) -> bool:
        """Whether a process that reached this point must wait."""
        if not (self._folder / place).exists():
            return False
        (self._folder / f"{place}.reached").touch()
        return True


def wait_for_release(place: str) -> None:
    places = HeldPlaces.of_this_run()
    while places.keeps(place):
        time.sleep(_POLL_S)


async def await_release(place: str) -> None:
    places = HeldPlaces.of_this_run()
    while places.keeps(place):  # noqa: ASYNC110  waits for another process
        await asyncio.sleep(_POLL_S)


async def held_reward(
    prompts: list[str], completions: list[str], **columns: list[Any]
) -> list[float]:
    """Returns different rewards for different completions. Held as "evaluation" or "batch"."""
    await await_release("evaluation" if prompts[0].startswith("held out") else "batch")
    return [len(set(text)) / max(1, len(text)) for text in completions]


class HeldEngine(EchoEngine):
    """An engine that is held while it takes weights ("sync")."""

    async def load(self) -> dict[str, int]:
        await await_release("sync")
        return await super().load()


def _hold_ranks() -> None:
    """Makes ranks wait at the beginning of their step."""
    from umbra.trainer.step import TrainStep

    run = TrainStep.run

    def held_run(self: TrainStep, *args: Any) -> dict[str, float]:
        wait_for_release("step")
        return run(self, *args)

    TrainStep.run = held_run  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    from umbra.trainer.command_line import main, run_program

    _hold_ranks()
    run_program(main)
