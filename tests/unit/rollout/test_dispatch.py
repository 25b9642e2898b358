"""The dispatcher against simulated engines that abort, die, lose and repeat tokens.

The token at completion offset i of a trajectory is a hash of (seed, i), as with the embedded
engine, so an interrupted trajectory must equal the uninterrupted one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from dispatch_bench import STOP, A, B, Bench, delta
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import EngineError
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.token_store import Runs
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.rollout_config import SamplingOptions


def token_at(seed: int, position: int) -> int:
    return random.Random(f"{seed}:{position}").randrange(12)  # 0 is the stop token


def expected_completion(seed: int, budget: int, stop: Sequence[str] = ()) -> tuple[list[int], str]:
    """The tokens, and the reason why there are no more."""
    tokens: list[int] = []
    while len(tokens) < budget:
        tokens.append(token_at(seed, len(tokens)))
        text = "".join(chr(97 + token) for token in tokens)
        if tokens[-1] == STOP or any(text.endswith(end) for end in stop):
            return tokens, "stop"
    return tokens, "length"


def test_it_tells_whether_anything_is_left_to_generate() -> None:
    bench = Bench()
    first = bench.submit("first")
    assert bench.told[-1], "waiting for an engine is work"
    inbox = bench.serve(A)
    bench.submit("second")

    bench.dispatcher.cancel([first])
    assert bench.told[-1]
    request_id = inbox.requests[-1]["id"]
    bench.dispatcher.on_batch(A, delta([(request_id, 0, [STOP], 1)]))
    bench.dispatcher.on_batch(A, delta([], [(request_id, "stop")]))

    assert bench.ended == {"second": "stop"}
    assert not bench.told[-1]


def test_a_request_has_all_that_an_engine_needs() -> None:
    bench = Bench()
    inbox = bench.serve(A)

    bench.submit(seed=99, budget=7)

    request = inbox.requests[0]
    assert request["tokens"].tolist() == [1, 2, 3]
    assert request["tokens"].dtype == np.int32
    del request["tokens"]
    assert request == {
        "id": 1,
        "position": 0,
        "seed": 99,
        "max_new_tokens": 7,
        "temperature": 1.0,
        "stop_token_ids": [STOP],
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_k": 5}),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 5}, {"temperature": 0.0}),
    ],
)
def test_a_request_says_which_part_of_the_distribution_is_sampled(
    options: dict[str, Any], expected: dict[str, float]
) -> None:
    fields = SamplingOptions(**options).request_fields()

    assert fields == {**expected, "stop_token_ids": ()}


def test_tokens_that_were_the_last_end_a_turn_though_the_engine_died() -> None:
    bench = Bench()
    bench.serve(A)
    bench.submit("full", budget=2)
    bench.submit("stopped", budget=9)
    bench.dispatcher.on_batch(A, delta([(1, 0, [7, 8], 0), (2, 0, [5, STOP], 0)]))
    assert bench.ended == {}

    bench.dispatcher.detach(A)

    assert bench.ended == {"full": "length", "stopped": "stop"}
    assert bench.dispatcher.num_waiting == 0


def test_losses_that_are_made_good_are_forgiven() -> None:
    bench = Bench()
    bench.serve(A)
    turn = bench.submit()

    for request_id in range(1, 8):
        at = turn.trajectory.completion_len
        bench.dispatcher.on_batch(
            A, delta([(request_id, at, [7], 0), (request_id, at + 5, [7], 0)])
        )

    assert not bench.failures
    assert turn.trajectory.completion_len == 7


def test_an_engine_that_comes_late_takes_over_what_has_not_begun() -> None:
    bench = Bench()
    first = bench.serve(A)
    turns = [bench.submit(f"s{i}", seed=i) for i in range(9)]
    bench.dispatcher.on_batch(A, delta([(9, 0, [7], 0)]))

    second = bench.serve(B)

    assert first.withdrawn == [8, 7, 6, 5], "the newest of those without a token"
    assert [request["seed"] for request in second.requests] == [4, 5, 6, 7]
    assert all(turn.trajectory.num_interruptions == 0 for turn in turns)
    assert bench.dispatcher.counters["moved"] == 4
    bench.dispatcher.check_integrity()


def test_a_turn_that_waits_in_an_engine_is_not_interrupted_by_its_abort() -> None:
    bench = Bench()
    bench.serve(A)
    waiting, running = (bench.submit(name) for name in ("waiting", "running"))
    bench.dispatcher.on_batch(A, delta([(2, 0, [7], 0)]))

    bench.dispatcher.on_batch(A, delta([], [(1, "abort"), (2, "abort")]))
    bench.dispatcher.on_batch(A, delta([], [(3, "abort"), (4, "abort")]))

    assert waiting.trajectory.num_interruptions == 0
    assert running.trajectory.num_interruptions == 1
    assert running.trajectory.num_refilled_tokens == len(running.trajectory)
    bench.dispatcher.check_integrity()


def test_an_engine_that_comes_late_gets_no_more_than_it_may_hold() -> None:
    bench = Bench(max_inflight=6)
    for engine in (A, EngineId("c", 1)):
        bench.serve(engine)
    for i, budget in enumerate((1000, 1000, *[1] * 10)):
        bench.submit(f"s{i}", budget=budget)

    late = bench.serve(B)

    assert len(late.requests) == 6, "its share of the tokens would be all ten short ones"
    bench.dispatcher.check_integrity()


def test_the_samples_of_a_group_go_where_its_prompt_is() -> None:
    bench, group = Bench(), Group("g", [])
    for engine in (A, B):
        bench.serve(engine)

    for idx in range(2):
        bench.submit(f"s{idx}", group=group)

    assert [bench.dispatcher.num_inflight(engine) for engine in (A, B)] == [2, 0]


def test_an_engine_that_delivers_more_is_given_more() -> None:
    bench = Bench(max_inflight=1000)
    for engine in (A, B):
        bench.serve(engine)
    for idx in range(2):
        bench.submit(f"long{idx}", seed=idx, budget=2000)

    for tick in range(20):
        bench.now = float(tick)
        bench.dispatcher.on_batch(A, delta([(1, 10 * tick, [7] * 10, 0)]))
        bench.dispatcher.on_batch(B, delta([(2, 30 * tick, [7] * 30, 0)]))
    before = [len(bench.inboxes[engine].requests) for engine in (A, B)]
    for idx in range(100):
        bench.submit(f"s{idx}", seed=idx, budget=500)

    given_a, given_b = (
        len(bench.inboxes[engine].requests) - count
        for engine, count in zip((A, B), before, strict=True)
    )
    assert given_b == pytest.approx(3 * given_a, rel=0.2)
    bench.dispatcher.check_integrity()


def test_a_finish_before_its_tokens_is_not_believed_and_fails_in_the_end() -> None:
    bench = Bench()
    inbox = bench.serve(A)
    bench.submit()

    for request_id in range(1, 6):
        bench.dispatcher.on_batch(A, delta([], [(request_id, "stop")]))

    assert len(inbox.requests) == 5
    assert isinstance(bench.failures[0], EngineError)
    assert "attempt 5 of 5: 'stop' with 20 tokens left" in str(bench.failures[0])


def test_a_turn_that_an_engine_failed_goes_to_another_that_serves() -> None:
    bench = Bench()
    bench.serve(B)
    bench.submit("long", budget=1000)
    bench.serve(A)
    turn = bench.submit()
    assert turn.engine == A, "the engine with less work"

    for failing, other in ((A, B), (B, A)):
        bench.dispatcher.on_batch(failing, delta([], [(turn.request_id, "error: broken")]))
        assert turn.engine == other

    bench.dispatcher.set_serving(B, False)
    bench.dispatcher.on_batch(A, delta([], [(turn.request_id, "error: broken")]))
    assert turn.engine == A
    bench.dispatcher.check_integrity()


def test_an_engine_that_failed_a_turn_gets_others_while_that_one_waits_for_another_engine() -> None:
    bench = Bench(max_inflight=1)
    for engine in (A, B):
        bench.serve(engine)
    first, second, third = bench.submit(), bench.submit(), bench.submit()
    failing, other = first.engine, second.engine
    assert failing is not None
    assert other is not None

    bench.dispatcher.on_batch(failing, delta([], [(first.request_id, "error: broken")]))
    assert (first.engine, second.engine, third.engine) == (None, other, failing)

    bench.dispatcher.cancel([second])
    assert first.engine == other
    bench.dispatcher.check_integrity()


def test_an_engine_that_fails_all_it_gets_does_not_get_all_that_waits() -> None:
    bench = Bench(max_inflight=1)
    bench.serve(B)
    long = bench.submit()
    bench.serve(A)
    turns = [bench.submit() for _ in range(40)]

    while failed := [turn for turn in turns if turn.engine == A]:
        bench.dispatcher.on_batch(A, delta([], [(failed[0].request_id, "error: broken")]))

    assert long.engine == B
    assert sum(turn.num_errors for turn in turns) == 17, "sixteen let others pass"
    bench.dispatcher.check_integrity()


def test_an_engine_that_serves_again_does_not_get_back_what_it_failed() -> None:
    bench = Bench(max_inflight=9)
    for engine in (A, B):
        bench.serve(engine)
    turns = [bench.submit() for _ in range(4)]
    failed = [turn for turn in turns if turn.engine == A]
    finishes = [(turn.request_id, "error: broken") for turn in failed]
    bench.dispatcher.on_batch(A, delta([], finishes))
    assert {turn.engine for turn in turns} == {B}

    bench.dispatcher.set_serving(A, False)
    bench.dispatcher.set_serving(A, True)

    assert {turn.engine for turn in failed} == {B}
    assert {turn.engine for turn in turns} == {A, B}, "others move"
    bench.dispatcher.check_integrity()


def test_cancelled_turns_vanish_and_their_requests_are_withdrawn() -> None:
    bench = Bench(max_inflight=1)
    inbox = bench.serve(A)
    turns = [bench.submit(f"s{i}", seed=i) for i in range(3)]

    bench.dispatcher.cancel(turns[:2])

    assert inbox.withdrawn == [1]
    assert len(inbox.requests) == 2, "the third got the room of the first"
    bench.dispatcher.on_batch(A, delta([(1, 0, [7], 0)], [(1, "abort")]))
    assert bench.ended == {}
    bench.dispatcher.check_integrity()


@pytest.mark.parametrize("is_handed_back", [False, True])
@pytest.mark.parametrize("first", range(4))
def test_whatever_a_turns_end_cancels_is_neither_queued_nor_ended(
    first: int, is_handed_back: bool
) -> None:
    bench = Bench()
    bench.serve(A)
    turns = [bench.submit(f"s{idx}", budget=2) for idx in range(4)]
    for turn in turns[first], turns[first - 1]:  # two have all of their tokens, but no finish
        bench.dispatcher.on_batch(A, delta([(turn.request_id, 0, [7, 8], 0)]))
    ended: list[Turn] = []

    def cancel_the_others(turn: Turn, _: str) -> None:
        ended.append(turn)
        bench.dispatcher.cancel([other for other in turns if other is not turn])

    for turn in turns:
        turn.on_end = cancel_the_others

    if is_handed_back:
        bench.dispatcher.hand_back(A, [turn.request_id for turn in turns])
    else:
        bench.dispatcher.detach(A)

    assert len(ended) == 1
    assert not bench.dispatcher.has_work
    bench.dispatcher.check_integrity()


@pytest.mark.parametrize("failing", ["started", "cut"])
def test_what_a_recorder_that_fails_cancels_is_not_given_to_an_engine(failing: str) -> None:
    class Failing(Recorder):
        def cut(self, sample: Trajectory) -> None:
            self.fail("cut")

        def started(self, sample: Trajectory) -> None:
            self.fail("started")

        def fail(self, event: str) -> None:
            if event == failing and turns:
                bench.dispatcher.cancel(turns)

    turns: list[Turn] = []
    bench = Bench(recorder=Failing(None, lambda error: None))
    inbox = bench.serve(A)
    waiting = [bench.submit(f"s{idx}") for idx in range(3)]
    bench.dispatcher.on_batch(A, delta([(request_id, 0, [7], 0) for request_id in (1, 2, 3)]))
    turns += waiting

    bench.dispatcher.detach(A)
    inbox = bench.serve(B)

    assert {request["id"] for request in inbox.requests} == set(inbox.withdrawn)
    assert not bench.dispatcher.has_work
    bench.dispatcher.check_integrity()


@pytest.mark.parametrize("how", ["aborted", "handed back", "lost"])
def test_turns_that_come_back_keep_their_order_before_those_that_wait(how: str) -> None:
    bench = Bench(max_inflight=3)
    bench.serve(A)
    for seed in range(4):
        bench.submit(f"s{seed}", seed=seed)
    if how == "lost":
        bench.dispatcher.detach(A)
    else:
        bench.dispatcher.set_serving(A, False)
    if how == "handed back":
        bench.dispatcher.hand_back(A, [1, 2, 3])
    elif how == "aborted":
        bench.dispatcher.on_batch(A, delta([], [(1, "abort"), (2, "abort"), (3, "abort")]))

    inbox = bench.serve(B)

    assert [request["seed"] for request in inbox.requests] == [0, 1, 2]
    bench.dispatcher.check_integrity()


def test_requests_that_an_engine_will_not_take_wait_for_one_that_serves() -> None:
    bench = Bench()
    bench.serve(A)
    bench.submit()

    bench.dispatcher.hand_back(A, [1])
    assert bench.dispatcher.num_waiting == 1

    bench.dispatcher.set_serving(A, True)
    assert bench.dispatcher.num_waiting == 0
    bench.dispatcher.check_integrity()


class ListRecorder(Recorder):
    """Keeps recorded tokens, as (uid, start, tokens, version) runs."""

    def __init__(self) -> None:
        super().__init__(None, lambda error: None)
        self.runs: list[tuple[int, int, list[int], int]] = []

    def on_tokens(self, runs: Runs) -> None:
        for idx, uid in enumerate(runs.uids.tolist()):
            run = runs.tokens[runs.offsets[idx] : runs.offsets[idx + 1]].tolist()
            self.runs.append((uid, int(runs.starts[idx]), run, int(runs.versions[idx])))


def test_the_recorder_gets_what_was_really_appended() -> None:
    recorder = ListRecorder()
    bench = Bench(recorder=recorder)
    bench.serve(A)
    for idx in range(4):
        bench.submit(f"s{idx}", seed=idx, budget=3, uid=10 + idx)
    bench.submit("unrecorded", budget=3)

    bench.dispatcher.on_batch(
        A,
        delta(
            [
                (1, 0, [7, 8], 0),
                (2, 0, [7], 0),
                (2, 0, [7, 8], 1),
                (3, 1, [9], 0),
                (4, 0, [7, 8, 9, 10], 0),
                (5, 0, [7], 0),
            ],
            [(4, "length")],
        ),
    )

    assert sorted(recorder.runs) == [
        (10, 0, [7, 8], 0),
        (11, 0, [7], 0),
        (11, 1, [8], 1),
        (13, 0, [7, 8, 9], 0),
    ]
    assert bench.ended == {"s3": "length"}
    assert bench.dispatcher.counters["repeats"] == 1


def test_a_stop_text_ends_a_turn_with_the_token_that_completes_it() -> None:
    recorder = ListRecorder()
    bench = Bench(recorder=recorder, stop=["hij"])
    inbox = bench.serve(A)
    turn = bench.submit(uid=10)
    bench.submit("other", seed=2)

    bench.dispatcher.on_batch(A, delta([(1, 0, [5, 7, 8], 0)]))
    bench.dispatcher.on_batch(
        A, delta([(1, 3, [9, 5, 5], 0), (1, 6, [4], 0), (2, 0, [7], 0)], [(1, "length")])
    )

    assert bench.ended == {"s": "stop"}
    assert inbox.withdrawn == [1], "the engine goes on otherwise"
    assert turn.trajectory.tokens.tolist() == [5, 7, 8, 9]
    assert len(turn.trajectory.logprobs) == 4
    assert recorder.runs == [(10, 0, [5, 7, 8], 0), (10, 3, [9], 0)]
    assert bench.dispatcher.counters["lost_tokens"] == 3
    assert bench.dispatcher.num_inflight(A) == 1
    bench.dispatcher.check_integrity()


def test_a_stop_text_may_begin_before_an_abort_or_the_death_of_an_engine() -> None:
    bench = Bench(stop=["hij"])
    bench.serve(A)
    turn = bench.submit()
    bench.dispatcher.on_batch(A, delta([(1, 0, [7], 0)], [(1, "abort")]))
    bench.dispatcher.on_batch(A, delta([(2, 1, [8], 1)]))
    bench.dispatcher.detach(A)
    bench.serve(B)

    bench.dispatcher.on_batch(B, delta([(3, 2, [9, 9], 1)]))

    assert turn.trajectory.tokens.tolist() == [7, 8, 9]
    assert bench.ended == {"s": "stop"}
    assert bench.dispatcher.counters["aborts"] == 1


def test_a_stop_text_is_found_in_what_an_earlier_manager_recorded() -> None:
    bench = Bench(stop=["hij"])
    inbox = bench.serve(A)

    bench.submit("begun", so_far=[7, 8])
    bench.submit("complete", so_far=[7, 8, 9])

    assert bench.ended == {"complete": "stop"}
    assert [request["position"] for request in inbox.requests] == [2]
    bench.dispatcher.on_batch(A, delta([(1, 2, [9], 0)]))
    assert bench.ended["begun"] == "stop"


@pytest.mark.parametrize("stop", [[], ["dc", "jij"]], ids=["tokens", "texts"])
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6))
def test_no_fault_changes_loses_or_repeats_a_token(
    stop: list[str], seed: int, num_turns: int, max_inflight: int
) -> None:
    chance = random.Random(seed)
    bench = Bench(max_inflight, stop=stop)
    lives = {"a": 1, "b": 1}
    for name in lives:
        bench.serve(EngineId(name, 1))
    turns = [bench.submit(f"s{i}", seed=seed + i, budget=30) for i in range(num_turns)]

    for tick in range(2000):
        if len(bench.ended) == num_turns:
            break
        name = chance.choice(["a", "b"])
        engine = EngineId(name, lives[name])
        fault = chance.random()
        if fault < 0.05:
            lives[name] += 1
            bench.dispatcher.detach(engine)
            bench.serve(EngineId(name, lives[name]))
        else:
            bench.dispatcher.on_batch(engine, simulate_tick(bench, engine, chance, tick))
        bench.dispatcher.check_integrity()

    assert not bench.failures
    for turn in turns:
        wanted, reason = expected_completion(turn.trajectory.seed, 30, stop)
        assert turn.trajectory.tokens.tolist() == wanted
        assert bench.ended[turn.trajectory.sample_id] == reason
        assert (np.diff(turn.trajectory.versions) >= 0).all()


def simulate_tick(
    bench: Bench, engine: EngineId, chance: random.Random, version: int
) -> DeltaBatch:
    """Some tokens for every request the engine knows, sometimes repeated or aborted."""
    inbox = bench.inboxes[engine]
    runs: list[tuple[int, int, Sequence[int], int]] = []
    finishes: list[tuple[int, str]] = []
    for request in list(inbox.requests):
        at, seed = request["position"], request["seed"]
        count = min(chance.randrange(4), request["max_new_tokens"])
        tokens: list[int] = []
        while len(tokens) < count and STOP not in tokens:
            tokens.append(token_at(seed, at + len(tokens)))
        if tokens:
            runs.append((request["id"], at, tokens, version))
            if chance.random() < 0.1:
                runs.append((request["id"], at, tokens, version))
        request["position"] += len(tokens)
        request["max_new_tokens"] -= len(tokens)
        if STOP in tokens:
            finishes.append((request["id"], "stop"))
        elif request["max_new_tokens"] == 0:
            finishes.append((request["id"], "length"))
        elif chance.random() < 0.1:
            finishes.append((request["id"], "abort"))
        else:
            continue
        inbox.requests.remove(request)
    return delta(runs, finishes)


def test_an_engine_that_serves_again_costs_no_look_at_what_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, has_begun = 0, Turn.has_begun

    def counted(turn: Turn) -> bool:
        nonlocal looks
        looks += 1
        return bool(has_begun.__get__(turn))

    monkeypatch.setattr(Turn, "has_begun", property(counted))
    bench = Bench(max_inflight=60)
    engines = [EngineId(f"e{idx}", 1) for idx in range(8)]
    for engine in engines:
        bench.serve(engine)
    for idx in range(240):
        bench.submit(f"s{idx}", budget=20 + idx % 7)
    for engine in engines:
        requests = bench.inboxes[engine].requests
        bench.dispatcher.on_batch(engine, delta([(asked["id"], 0, [9], 0) for asked in requests]))

    for serving in (False, True) * 4:
        for engine in engines:
            bench.dispatcher.set_serving(engine, serving)

    assert looks <= 240, "each is met once"
    bench.dispatcher.check_integrity()
