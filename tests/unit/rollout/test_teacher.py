"""The questions to a teacher's pool, against a handle that answers when told."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from rollout_samples import make_trajectory

from umbra.runtime.errors import DeadlineExceeded, UmbraError
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.manager.teacher import Teacher


class Pool:
    """Context and handle of the teacher's generator."""

    def __init__(self) -> None:
        self.answers: dict[int, asyncio.Future[Any]] = {}  # by the first token of the completion

    async def resolve(self, name: str, timeout_s: float) -> str:
        return name

    def connect(self, ref: str) -> Pool:
        return self

    async def call(self, method: str, prompt: Any, completion: Any, timeout_s: float) -> Any:
        assert (method, prompt.tolist()) == ("score", [1, 2])
        answer = self.answers[int(completion[0])] = asyncio.get_running_loop().create_future()
        return await answer


def sample_of(token: int) -> Trajectory:
    sample = make_trajectory()
    sample.append_generated(np.asarray([token], np.int32), np.zeros(1, np.float32), 0)
    sample.finish("stop")
    return sample


async def settle() -> None:
    """Lets all tasks run until they wait."""
    for _ in range(9):
        await asyncio.sleep(0)


def test_questions_are_asked_together_and_withdrawn_ones_cost_the_teacher_nothing() -> None:
    async def body() -> None:
        pool, failures, answers = Pool(), list[UmbraError](), list[Any]()
        context: Any = pool
        teacher = Teacher("teacher-generator", 9.0, context, failures.append)
        samples = [sample_of(token) for token in (5, 6, 7)]
        for sample in (*samples, early := sample_of(8)):
            teacher.ask(sample, answers.append)
        teacher.withdraw([early])  # before the generator is found
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(teacher.run())
            await settle()

            teacher.withdraw(samples[:1])
            pool.answers[6].set_result(np.asarray([-0.5], np.float32))
            pool.answers[7].set_exception(DeadlineExceeded("no answer in 9 s"))
            await settle()

            assert pool.answers[5].cancelled()
            assert 8 not in pool.answers
            assert [found.tolist() for found in answers] == [[-0.5]]
            (failure,) = failures
            assert str(failure) == "the teacher did not score e0/p/0: no answer in 9 s"
            teacher.withdraw(samples)  # they are answered
            running.cancel()

    asyncio.run(body())
