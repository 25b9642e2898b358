"""The embedded engine where it lives: in processes of their own, called over RPC."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runs import Collector, wire_request

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.errors import RemoteError, UmbraError
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session

pytestmark = pytest.mark.process

VOCAB_SIZE = 97


def spawn_engine(session: Session, name: str, folder: Path, **settings: Any) -> SyncHandle:
    kwargs = {
        "model_path": str(folder),
        "dtype": "float64",
        "max_context_len": 512,
        "max_num_seqs": 32,
        "load_weights": True,
        "tick_ms": 5.0,
    }
    spec = ActorSpec(
        name=name,
        target="umbra.engines.embedded.embedded_engine:EmbeddedEngine",
        kwargs=kwargs | settings,
        essential=False,
        restart=RestartPolicy(mode="never"),
    )
    return session.spawn(spec)


def pid_of(session: Session, name: str) -> int:
    (actor,) = (a for a in session.supervisor_call("list_actors") if a["name"] == name)
    pid: int = actor["pid"]
    return pid


def read(engine: SyncHandle, collector: Collector, enough: Callable[[], bool]) -> None:
    with closing(engine.stream("deltas", timeout_s=30.0)) as batches:
        for batch in batches:
            collector.apply(batch)
            if enough():
                return


@pytest.mark.slow
def test_a_killed_engine_s_trajectories_go_on_elsewhere_token_for_token(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder("qwen3")
    first = spawn_engine(umbra_session, "first", folder)
    second = spawn_engine(umbra_session, "second", folder, kv_cache_num_tokens=2048)
    rng = np.random.default_rng(0)
    requests = [
        wire_request(
            i,
            rng.integers(0, VOCAB_SIZE, 20).tolist(),
            max_new_tokens=300,
            temperature=float(i % 2),
        )
        for i in range(24)
    ]
    whole, part, rest = Collector(), Collector(), Collector()
    first.call("submit", requests)
    read(first, whole, lambda: whole.num_finished() == len(requests))

    first.call("submit", requests)
    with pytest.raises(UmbraError):
        read(first, part, killing(pid_of(umbra_session, "first"), part, 50))
    second.call("submit", [cut(request, part[request["id"]].tokens) for request in requests])
    read(second, rest, lambda: rest.num_finished() == len(requests))

    for i in range(len(requests)):
        assert 0 < len(part[i].tokens) < 300
        assert part[i].tokens + rest[i].tokens == whole[i].tokens


def killing(pid: int, collector: Collector, num_tokens: int) -> Callable[[], bool]:
    """Kills the engine, once, when every request has some tokens; never enough, because tokens
    that it sent before arrive afterwards."""
    is_killed = False

    def look() -> bool:
        nonlocal is_killed
        has_some = len(collector.completions) == 24 and all(
            len(c.tokens) >= num_tokens for c in collector.completions.values()
        )
        if has_some and not is_killed:
            is_killed = True
            os.kill(pid, signal.SIGKILL)
        return False

    return look


def cut(request: dict[str, Any], so_far: list[int]) -> dict[str, Any]:
    return request | {
        "tokens": np.append(request["tokens"], np.array(so_far, np.int32)),
        "position": len(so_far),
        "max_new_tokens": request["max_new_tokens"] - len(so_far),
    }


@pytest.mark.slow
def test_a_wrong_request_reaches_its_caller_as_a_value_error(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    engine = spawn_engine(umbra_session, "engine", model_folder("qwen3"))

    with pytest.raises(RemoteError, match="top_p") as caught:
        engine.call("submit", [wire_request(1, [1]) | {"top_p": 1.9}])

    assert caught.value.remote_type == "builtins.ValueError"
    assert engine.call("stats")["running"] == 0


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_fails_the_start_with_the_reason(
    umbra_session: Session,
) -> None:
    with pytest.raises(UmbraError, match="'/nowhere' does not exist"):
        spawn_engine(umbra_session, "engine", Path("/nowhere"))


@pytest.mark.slow
def test_a_limit_of_openmp_below_the_number_of_threads_leaves_no_logits_out(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    assert os.environ["OMP_THREAD_LIMIT"] == "1"  # all tests have it
    settings: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 4}
    engine = spawn_engine(umbra_session, "engine", model_folder("qwen3"), **settings)
    found = Collector()

    for idx in range(1, 17):  # one at a time, so that products have all these sizes
        engine.call("submit", [wire_request(idx, list(range(1, idx + 1)), max_new_tokens=4)])
        read(engine, found, lambda: found.num_finished() == idx)  # noqa: B023

    assert {completion.reason for completion in found.completions.values()} == {"length"}
