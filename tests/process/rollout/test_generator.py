"""Generation for anyone: a pool with its own weights, a generator actor, no manager, no ledger."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from umbra.engines.echo.echo_engine import EchoTokens
from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.cluster.placement import PoolMode
from umbra.runtime.errors import RemoteError, RequestRefused, WeightSyncError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

pytestmark = [pytest.mark.process, pytest.mark.slow]

VOCAB_SIZE = 64
PROMPT = np.asarray([1, 2, 3], np.int32)
SOON = RestartPolicy(mode="on_failure", max_restarts=5, backoff_initial_s=0.05)


def start(
    session: Session,
    *,
    num_engines: int = 1,
    tokens_per_s: float | None = None,
    mode: PoolMode = "standalone",
    faults: Sequence[dict[str, Any]] = (),
    **config: Any,
) -> SyncHandle:
    """A pool of echo engines that have their own weights, and its generator."""
    session.create_pool(
        PoolSpec(
            name="judge",
            engine="umbra.engines.faulty.faulty_engine:FaultyEngine",
            count=num_engines,
            mode=mode,
            kwargs={
                "inner": "echo",
                "faults": list(faults),
                "vocab_size": VOCAB_SIZE,
                "tick_ms": 5.0,
                "max_context_len": 4096,
                "tokens_per_s": tokens_per_s,
            },
            restart=SOON,
            load_weights=True,
        )
    )
    settings = {"pool": "judge", "max_context_len": 1024, **config}
    return session.spawn(
        ActorSpec(
            name="judge-front",
            target="umbra.runtime.rollout.dispatch.generator:GeneratorService",
            kwargs={"config": settings},
        )
    )


def expected(seed: int, num_tokens: int) -> list[int]:
    return EchoTokens(seed, PROMPT, vocab_size=VOCAB_SIZE).draw(num_tokens).tokens.tolist()


def pids(session: Session) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in session.supervisor_call("list_actors")}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_pool_with_its_own_weights_generates_at_once_and_takes_no_others(
    umbra_session: Session,
) -> None:
    judge = start(umbra_session)

    answer = judge.call("generate", PROMPT, 40, seed=7)
    stop = expected(3, 30)[9]
    stopped = judge.call("generate", PROMPT, 30, 0.5, [stop], seed=3)

    assert answer["tokens"].tolist() == expected(7, 40)
    assert answer["tokens"].dtype == np.int32
    assert answer["logprobs"].shape == (40,)
    assert answer["finish_reason"] == "length"
    assert stopped["tokens"].tolist() == expected(3, 30)[: expected(3, 30).index(stop) + 1]
    assert stopped["finish_reason"] == "stop"
    assert [state["version"] for state in umbra_session.pool("judge").states()] == [0]
    publisher = WeightPublisher(umbra_session, {"w": torch.zeros(10)})
    with pytest.raises(WeightSyncError, match="load their own"):
        publisher.publish("judge", 1, 30.0)
    refuse_what_cannot_be_asked(judge)


def test_given_completions_are_scored_whatever_becomes_of_the_engines(
    umbra_session: Session,
) -> None:
    kill = {"kind": "kill", "after_tokens": 50, "incarnations": [1]}
    judge = start(umbra_session, num_engines=2, tokens_per_s=200.0, faults=[kill])
    completion = np.arange(120, dtype=np.int32) % VOCAB_SIZE

    found = judge.call("score", PROMPT, completion)

    assert (found.dtype, found.shape) == (np.float32, (120,))
    assert judge.call("score", PROMPT, completion[:0]).shape == (0,)
    with pytest.raises(RemoteError, match="3 tokens and 1022 of a completion exceed the context"):
        judge.call("score", PROMPT, np.ones(1022, np.int32))
    with pytest.raises(RequestRefused, match="forced: token 64 at index 1 is outside"):
        judge.call("score", PROMPT, np.asarray([1, 64], np.int32))


def test_a_stream_that_loses_its_engine_continues_elsewhere(umbra_session: Session) -> None:
    kill = {"kind": "kill", "after_tokens": 50, "incarnations": [1]}
    judge = start(umbra_session, num_engines=2, tokens_per_s=200.0, faults=[kill])

    pieces = list(judge.stream("stream", PROMPT, 300, 1.0, [], 11))

    assert [token for piece in pieces for token in piece["tokens"].tolist()] == expected(11, 300)
    assert 0 < len(pieces[0]["tokens"]) < 50, "some came from an engine that was lost"
    reasons = [piece["finish_reason"] for piece in pieces]
    assert reasons == [""] * (len(pieces) - 1) + ["length"]
    wait_until(
        lambda: (
            {(s["state"], s["incarnation"]) for s in umbra_session.pool("judge").states()}
            == {("SERVING", 2)}
        ),
        "both engines were lost, and came back with their own weights",
    )


def test_a_pool_that_is_put_to_sleep_continues_after_it_wakes(umbra_session: Session) -> None:
    judge = start(umbra_session, tokens_per_s=200.0, mode="hybrid")
    pool = umbra_session.pool("judge")
    pieces = judge.stream("stream", PROMPT, 100, 1.0, [], 5)

    tokens: list[int] = next(pieces)["tokens"].tolist()
    pool.sleep(1)
    pool.wake(["weights", "kv_cache"])
    pool.resume()
    for piece in pieces:
        tokens += piece["tokens"].tolist()

    assert tokens == expected(5, 100)


def test_an_engine_that_restarts_in_a_sleeping_pool_sleeps(umbra_session: Session) -> None:
    start(umbra_session)
    pool = umbra_session.pool("judge")

    pool.sleep(1)
    os.kill(pids(umbra_session)["judge-0"], signal.SIGKILL)

    wait_until(
        lambda: [(s["incarnation"], s["state"]) for s in pool.states()] == [(2, "ASLEEP")],
        "its successor sleeps, too",
    )


def test_a_caller_that_goes_away_frees_the_engine(umbra_session: Session) -> None:
    judge = start(umbra_session, tokens_per_s=50.0)
    engine = umbra_session.actor("judge-0")
    pieces = judge.stream("stream", PROMPT, 1000, 1.0, [], 5)
    next(pieces)
    assert engine.call("stats")["running"] == 1

    pieces.close()

    wait_until(lambda: engine.call("stats")["running"] == 0, "the engine works on")
    assert judge.call("stats")["open"] == 0


def test_a_request_that_no_engine_can_serve_fails_alone(umbra_session: Session) -> None:
    judge = start(umbra_session, mode="hybrid")
    pool = umbra_session.pool("judge")
    wrong = np.asarray([1, VOCAB_SIZE], np.int32)

    pool.sleep(1)
    with ThreadPoolExecutor(6) as callers:
        good = [callers.submit(judge.call, "generate", PROMPT, 50, seed=i) for i in range(5)]
        bad = callers.submit(judge.call, "generate", wrong, 50, seed=1)
        wait_until(lambda: judge.call("stats")["open"] == 6, "all ask while the engine sleeps")
        pool.wake(["weights", "kv_cache"])
        pool.resume()  # so that it gets all of them at once

    with pytest.raises(RequestRefused, match=rf"refused .*token {VOCAB_SIZE} at index 1"):
        bad.result()
    assert [call.result()["tokens"].tolist() for call in good] == [
        expected(seed, 50) for seed in range(5)
    ]


def refuse_what_cannot_be_asked(judge: SyncHandle) -> None:
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((np.asarray([], np.int32), 5), "prompt is empty"),
        ((np.zeros(1024, np.int32), 5), "leaves no room"),
        ((PROMPT, 0), "max_new_tokens"),
        ((PROMPT, 5, -0.5), "temperature"),
        ((PROMPT, 5, 1.0, [], -1), "seed"),
    ]

    for arguments, problem in wrong:
        with pytest.raises(RemoteError, match=problem) as caught:
            judge.call("generate", *arguments)
        assert caught.value.remote_type == "builtins.ValueError"
    with pytest.raises(RequestRefused, match="prompt: token -1 at index 1 is not a token id"):
        judge.call("generate", np.asarray([2, -1], np.int32), 5)
