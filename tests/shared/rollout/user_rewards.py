"""Reward functions as users write them, good and bad."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

hang_is_over = threading.Event()


def length(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    return [float(len(text)) for text in completions]


def constant(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    return [0.5] * len(completions)


def wants_answer(prompts: list[str], completions: list[str], answer: list[str]) -> list[bool]:
    return [text.strip() == right for text, right in zip(completions, answer, strict=True)]


def wants_answer_among_others(
    prompts: list[str], completions: list[str], answer: list[str], **columns: list[Any]
) -> list[bool]:
    return wants_answer(prompts, completions, answer)


def starts_with_answer(
    prompts: list[str], completions: list[str], answer: list[str]
) -> list[float]:
    return [float(text.startswith(right)) for text, right in zip(completions, answer, strict=True)]


async def slow_judge(prompts: list[str], completions: list[str], **_: Any) -> list[int]:
    await asyncio.sleep(0.01)
    return [1] * len(completions)


async def always_blocks(prompts: list[str], completions: list[str], **_: Any) -> list[int]:
    time.sleep(60.0)  # noqa: ASYNC251
    return [1] * len(completions)


def hangs_for_t3(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Takes its time for the others."""
    time.sleep(60.0 if prompts[0] == "t3" else 0.6)
    return [1.0] * len(completions)


async def blocks_for_t3(prompts: list[str], completions: list[str], **_: Any) -> list[int]:
    if prompts[0] == "t3":
        time.sleep(60.0)  # noqa: ASYNC251
    return [1] * len(completions)


def punishes_length(
    prompts: list[str], completions: list[str], num_tokens: list[int], finish_reason: list[str]
) -> list[float]:
    ends = zip(num_tokens, finish_reason, strict=True)
    return [-number - 100.0 * (reason == "length") for number, reason in ends]


def punishes_length_by_columns(
    prompts: list[str], completions: list[str], **columns: list[Any]
) -> list[float]:
    return punishes_length(prompts, completions, columns["num_tokens"], columns["finish_reason"])


def raises(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    raise KeyError("no such answer")


def writes_to_a_full_disk(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    with open("/dev/full", "w") as file:
        file.write("x")
    return [1.0] * len(prompts)


def misspells(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    raise NameError("name 'anwser' is not defined")


def exits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    sys.exit("enough")


class LimitReached(BaseException):
    """Like the exceptions of math-verify, func_timeout and pytest."""


def reaches_a_limit(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    raise LimitReached("too slow")


async def reaches_a_limit_later(
    prompts: list[str], completions: list[str], **_: Any
) -> list[float]:
    await asyncio.sleep(0)
    raise LimitReached("too slow")


def interrupts(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    raise KeyboardInterrupt


def empties_its_lists(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    num_samples = len(completions)
    prompts.clear()
    completions.clear()
    return [0.0] * num_samples


def stops(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [next(iter(list[float]()))]


async def awaits_what_is_cancelled(
    prompts: list[str], completions: list[str], **_: Any
) -> list[float]:
    answer = asyncio.get_running_loop().create_future()
    answer.cancel()  # as by a client that another call has closed
    await answer
    return [1.0 for _ in completions]


def runs_what_is_cancelled(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return asyncio.run(awaits_what_is_cancelled(prompts, completions))


def gets_what_is_cancelled(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    score = concurrent.futures.Future[float]()
    score.cancel()  # as by an executor that is shut down
    return [score.result()] * len(completions)


async def awaits_what_an_executor_has_cancelled(
    prompts: list[str], completions: list[str], **_: Any
) -> list[float]:
    return gets_what_is_cancelled(prompts, completions)


def nan_for_the_last(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [0.0] * (len(completions) - 1) + [math.nan]


def nothing_for_the_first(prompts: list[str], completions: list[str], **_: Any) -> list[Any]:
    return [None, *([0.0] * (len(completions) - 1))]


def of_numpy(prompts: list[str], completions: list[str], **_: Any) -> list[Any]:
    return [np.float32(0.5), *([np.bool_(True)] * (len(completions) - 1))]


def of_torch(prompts: list[str], completions: list[str], **_: Any) -> Any:
    import torch

    return torch.full([len(completions)], 0.5)


def texts(prompts: list[str], completions: list[str], **_: Any) -> list[str]:
    return ["1.0"] * len(completions)


def texts_of_numpy(prompts: list[str], completions: list[str], **_: Any) -> Any:
    return np.asarray(["1.0"] * len(completions))


def one_text(prompts: list[str], completions: list[str], **_: Any) -> str:
    return "1" * len(completions)


def huge(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [0.0] * (len(completions) - 1) + [-1e300]


def huge_int(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [10**5000] * len(completions)


def too_few(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def a_number(prompts: list[str], completions: list[str], **_: Any) -> float:
    return 1.0


def hangs(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    hang_is_over.wait(30)
    return []


def hangs_lazily(prompts: list[str], completions: list[str], **_: Any) -> Iterator[float]:
    return map(lambda text: float(hang_is_over.wait(30)), completions)


def lazy(prompts: list[str], completions: list[str], **_: Any) -> Iterator[float]:
    return (float(len(text)) for text in completions)


def endless(prompts: list[str], completions: list[str], **_: Any) -> Iterator[float]:
    return itertools.repeat(0.0)


def raises_lazily(prompts: list[str], completions: list[str], **_: Any) -> Iterator[float]:
    yield 0.0
    raise KeyError("late")


def ends_by_alarm(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    def end(number: int, frame: object) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while True:
            pass
    except TimeoutError:
        return [0.5] * len(completions)
    finally:
        signal.signal(signal.SIGALRM, former)


def leaves_an_alarm(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The next call would get it."""
    time.sleep(0.2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return [1.0] * len(completions)


async def alarms_in_a_thread(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return await asyncio.to_thread(ends_by_alarm, prompts, completions)


def leaves_processes(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    statuses = [subprocess.run(["sh", "-c", "true & exit 0"]).returncode for _ in range(5)]
    return [float(sum(statuses))] * len(completions)


async def by_judge(prompts: list[str], completions: list[str], ctx: Any) -> list[float]:
    """The judge's answer to each text, of the requested length."""
    judge = ctx.pool("judge")
    answers = [await judge.complete(text, 3, temperature=0.0) for text in completions]
    return [float(len(answer.tokens)) for answer in answers]


def by_judge_at_once(prompts: list[str], completions: list[str], ctx: Any) -> list[float]:
    return [1.0 for _ in completions]
