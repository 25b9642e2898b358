"""The questions to a teacher's pool, against a handle that answers when told, and to the policy's
engines, by a dispatcher."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from async_tests import on_a_loop
from dispatch_bench import A, B, Bench, delta
from rollout_samples import make_trajectory

from umbra.runtime.errors import DeadlineExceeded, EngineError, UmbraError
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.manager.teacher import PolicyScorer, PoolScorer, Teacher, teacher_prompt
from umbra.runtime.rollout.prompts import Prompt


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


@on_a_loop
async def test_questions_are_asked_together_and_withdrawn_ones_cost_the_teacher_nothing() -> None:
    pool, failures, answers = Pool(), list[UmbraError](), list[Any]()
    context: Any = pool
    teacher = Teacher(PoolScorer("teacher-generator", context, 9.0), failures.append)
    samples = [sample_of(token) for token in (5, 6, 7)]
    for sample in (*samples, early := sample_of(8)):
        teacher.ask(sample, sample.prompt_tokens, answers.append)
    teacher.withdraw([early])  # before the teacher runs
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


@on_a_loop
async def test_the_policy_s_engines_score_among_their_requests_what_a_stop_text_would_cut() -> None:
    bench = Bench(max_inflight=2, stop=["b"])  # token 1
    engine = bench.serve(A)
    for name in ("first", "second", "third"):
        bench.submit(name)
    scorer = PolicyScorer(bench.dispatcher, 100, 60.0)
    async with asyncio.TaskGroup() as tasks:
        prompt, completion = np.asarray([7, 8], np.int32), np.asarray([2, 1, 3], np.int32)
        scored = tasks.create_task(scorer.score(prompt, completion))
        cancelled = tasks.create_task(scorer.score(prompt, completion))
        await settle()
        assert bench.dispatcher.num_waiting == 3
        bench.dispatcher.on_batch(A, delta([(1, 0, [0], 0), (2, 0, [0], 0)]))
        bench.dispatcher.on_batch(A, delta([], [(1, "stop"), (2, "stop")]))

        asked = engine.requests[2:]  # before the one that came first
        assert [request["tokens"].tolist() for request in asked] == [[7, 8], [7, 8]]
        assert [request["forced"].tolist() for request in asked] == [[2, 1, 3], [2, 1, 3]]
        cancelled.cancel()
        await settle()
        assert len(engine.withdrawn) == 1
        bench.dispatcher.detach(A)
        (again, *_) = bench.serve(B).requests
        assert again["forced"].tolist() == [2, 1, 3]
        answer = (again["id"], 0, [2, 1, 3], 0)
        bench.dispatcher.on_batch(B, delta([answer], [(again["id"], "length")]))

    assert scored.result().tolist() == [-1.0, -1.0, -1.0]
    assert bench.dispatcher.num_generated == 2
    bench.dispatcher.check_integrity()


@on_a_loop
async def test_what_engines_refuse_to_score_is_an_error() -> None:
    bench = Bench()
    bench.serve(A)
    scorer = PolicyScorer(bench.dispatcher, 100, 60.0)
    error = EngineError("no logprobs of forced tokens")
    asyncio.get_running_loop().call_soon(bench.dispatcher.refuse, A, 1, error)

    with pytest.raises(EngineError, match="no logprobs of forced tokens"):
        await scorer.score(np.ones(1, np.int32), np.ones(1, np.int32))

    assert not bench.failures  # the teacher reports it with the sample


@on_a_loop
async def test_a_question_that_the_policy_s_engines_do_not_answer_in_time_is_withdrawn() -> None:
    bench = Bench()
    engine = bench.serve(A)
    scorer = PolicyScorer(bench.dispatcher, 100, timeout_s=0.0)

    with pytest.raises(DeadlineExceeded, match="no answer within 0 s"):
        await scorer.score(np.ones(1, np.int32), np.ones(1, np.int32))

    assert len(engine.requests) == len(engine.withdrawn) == 1
    bench.dispatcher.check_integrity()


def test_a_teacher_is_shown_another_success_than_the_sample_without_its_end_token() -> None:
    parts = tuple(np.asarray(part, np.int32) for part in ([1, 2], [3]))
    prompt = Prompt("p", "", np.asarray([9], np.int32), {}, teacher=parts)
    first, second, third = (
        Trajectory(f"e0/p/{idx}", prompt, seed=idx, budget=3, max_context_len=9) for idx in range(3)
    )
    for sample, tokens in ((first, [5, 6]), (second, [7, 8])):
        sample.append_generated(np.asarray(tokens, np.int32), np.zeros(2, np.float32), 1)
        sample.finish("stop" if sample is first else "length")

    shown = [teacher_prompt(sample, [first, second]) for sample in (first, second, third)]

    assert [each.tolist() for each in shown if each is not None] == [
        [1, 2, 7, 8, 3],
        [1, 2, 5, 3],
        [1, 2, 5, 3],
    ]
    assert teacher_prompt(first, [first]) is None
    assert teacher_prompt(first, []) is None
