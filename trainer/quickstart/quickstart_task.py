"""The quickstart's task and reward: write the digits of one kind, in ascending order.

`even 73914826=` asks for `2468`, `low 73914826=` for `1234`. A prompt has 5 to 8 different
digits, so there are about 13 million prompts: held-out ones cannot have been memorised.

Standard library only, because rollout workers import it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

DIGITS: Final = "0123456789"
MIN_DIGITS: Final = 5
MAX_DIGITS: Final = 8
DONT_KNOW: Final = "?"

KINDS: Final[dict[str, Callable[[str], bool]]] = {
    "all": lambda digit: True,
    "even": lambda digit: int(digit) % 2 == 0,
    "odd": lambda digit: int(digit) % 2 == 1,
    "low": lambda digit: int(digit) < 5,
    "high": lambda digit: int(digit) >= 5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set."""

    prompt: str  # as the model sees it, "even 73914826="
    answer: str  # the one right completion, "2468"

    def row(self) -> dict[str, str]:
        """The columns of the JSONL file."""
        return asdict(self)


def solve(kind: str, digits: str) -> str:
    """Digits of `kind` in ascending order."""
    return "".join(digit for digit in sorted(digits) if KINDS[kind](digit))


def shy_answer(task: Task) -> str:
    """An answer that tries the easiest kind only."""
    return task.answer if task.prompt.startswith("all ") else DONT_KNOW


def draw_tasks(rng: random.Random, num_tasks: int) -> list[Task]:
    """Different tasks, kinds equally likely; none has an empty answer."""
    tasks: dict[str, Task] = {}
    while len(tasks) < num_tasks:
        kind = rng.choice(list(KINDS))
        digits = "".join(rng.sample(DIGITS, rng.randint(MIN_DIGITS, MAX_DIGITS)))
        answer = solve(kind, digits)
        if answer:
            task = Task(prompt=f"{kind} {digits}=", answer=answer)
            tasks.setdefault(task.prompt, task)
    return list(tasks.values())


def reward(
    prompts: list[str], completions: list[str], *, answer: list[str], **columns: list[object]
) -> list[float]:
    """1 for exactly the right answer, else 0."""
    return [
        float(completion == right) for completion, right in zip(completions, answer, strict=True)
    ]
