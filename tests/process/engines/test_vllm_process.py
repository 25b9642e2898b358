"""vLLM where it lives: in an actor's process, with processes of its own below it."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_runs import wire_request
from process_runs import actor_of, assert_ended, greedy, tree_of
from training_models import save_model
from vllm_runs import needs_vllm

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.errors import ActorDied, UmbraError
from umbra.runtime.process import descendants
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.process]

START_TIMEOUT_S = 180.0
NEVER = RestartPolicy(mode="never")


def vllm_spec(folder: Path, restart: RestartPolicy, **settings: Any) -> ActorSpec:
    kwargs = {
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_context_len": 512,
        "max_num_seqs": 16,
        "load_weights": True,
        "tick_ms": 5.0,
    }
    return ActorSpec(
        name="vllm",
        target="umbra.engines.vllm.vllm_engine:VllmEngine",
        kwargs=kwargs | settings,
        essential=False,
        restart=restart,
        start_timeout_s=START_TIMEOUT_S,
    )


def core_of(pid: int) -> int:
    """EngineCore: the child of the actor that has a child itself."""
    (core,) = (child for child in descendants.child_pids(pid) if descendants.child_pids(child))
    return core


def test_vllm_killed_takes_all_its_processes_along_and_serves_again(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    # Long enough that the third life has not begun when the test ends.
    restart = RestartPolicy(mode="on_failure", backoff_initial_s=3.0)
    spec = vllm_spec(model_folder("qwen3"), restart)
    engine = umbra_session.spawn(spec)
    first = engine.ref.incarnation
    before = greedy(engine)
    tree = tree_of(actor_of(umbra_session, "vllm")["pid"])
    assert len(tree) >= 3  # the actor, EngineCore and its worker

    os.kill(tree[0], signal.SIGKILL)

    engine = umbra_session.connect(
        umbra_session.supervisor_call(
            "resolve", "vllm", START_TIMEOUT_S, first, timeout_s=START_TIMEOUT_S + 1.0
        )
    )
    assert all(not Path(f"/proc/{pid}").exists() for pid in tree)
    assert greedy(engine) == before

    tree = tree_of(actor_of(umbra_session, "vllm")["pid"])
    os.kill(core_of(tree[0]), signal.SIGKILL)

    assert_ended(tree)  # the actor, too, which is of no use without its core


def disturb_generation(engine: SyncHandle, disturb: Callable[[], None], tree: list[int]) -> float:
    """Does it after the first tokens; after how many seconds the engine's processes had ended."""
    engine.call("submit", [wire_request(0, [1, 2, 3], max_new_tokens=500, temperature=0.0)])
    with closing(engine.stream("deltas", timeout_s=20.0)) as batches:
        next(batch for batch in batches if len(batch["tokens"]))
        began = time.monotonic()
        disturb()
        assert_ended(tree)
        return time.monotonic() - began


def hang(pid: int) -> None:
    """Holds its main thread, which is not stopped then as a signal does it, until it is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        assert libc.ptrace(request, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(pid, 0)


def test_vllm_whose_scheduler_is_stopped_or_hangs_is_replaced(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    restart = RestartPolicy(mode="on_failure", max_restarts=1)
    spec = vllm_spec(model_folder("qwen3"), restart)
    spec = replace(spec, role="engine", stall_limit_s=8.0)
    engine = umbra_session.spawn(spec)
    tree = tree_of(actor_of(umbra_session, "vllm")["pid"])

    took_s = disturb_generation(engine, lambda: os.kill(core_of(tree[0]), signal.SIGSTOP), tree)

    assert took_s < 8.0  # before the limit for stalls

    resolve = partial(umbra_session.supervisor_call, "resolve", "vllm", START_TIMEOUT_S)
    engine = umbra_session.connect(resolve(1, timeout_s=START_TIMEOUT_S + 1.0))
    tree = tree_of(actor_of(umbra_session, "vllm")["pid"])

    core = core_of(tree[0])
    assert disturb_generation(engine, lambda: hang(core), tree) > 8.0
    os.waitpid(core, 0)  # whom it holds nobody else can reap

    with pytest.raises(ActorDied, match="made no token"):
        resolve(2, timeout_s=START_TIMEOUT_S + 1.0)


def test_vllm_that_cannot_start_reports_the_reason(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    spec = vllm_spec(model_folder("qwen3"), NEVER, engine_args={"tensor_parallel_sice": 2})

    with pytest.raises(UmbraError, match="did you mean tensor_parallel_size"):
        umbra_session.spawn(spec)


def test_a_failed_start_reports_the_errors_of_vllms_processes_and_does_not_print_them(
    umbra_session: Session,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] += 64  # other than that of the weights
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ActorDied) as caught:
        umbra_session.spawn(vllm_spec(folder, NEVER))

    said = str(caught.value)
    assert "the first error in " in said
    assert "vllm.log:" in said
    assert "assert loaded_weight.shape" in said
    assert "EngineCore" not in "".join(capfd.readouterr())


def test_a_model_that_fails_at_its_first_request_is_reported_with_the_cause(
    umbra_session: Session, tmp_path: Path
) -> None:
    folder = save_model(  # with heads that vLLM does not have for the CPU
        tmp_path / "model", head_dim=16, max_position_embeddings=4096
    )

    with pytest.raises(ActorDied) as caught:
        umbra_session.spawn(vllm_spec(folder, NEVER))

    _, _, quoted = str(caught.value).partition("the first error in ")
    assert "Unsupported CPU attention configuration" in quoted


def test_vllm_that_starts_for_too_long_is_ended_with_its_last_lines(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    spec = replace(vllm_spec(model_folder("qwen3"), NEVER), role="engine", start_timeout_s=6.0)

    with pytest.raises(
        ActorDied, match=r"start_timeout_s = 6 \(pool.sync_timeout_s\); last output"
    ):
        umbra_session.spawn(spec)


@pytest.mark.parametrize("num_names", [1, 3])
def test_vllm_killed_while_it_starts_leaves_no_names(
    umbra_session: Session, model_folder: Callable[[str], Path], num_names: int
) -> None:
    before = shared_names()
    spec = vllm_spec(model_folder("qwen3"), NEVER)

    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(umbra_session.spawn, spec)
        while len(shared_names() - before) < num_names:
            assert not starting.done()
            time.sleep(0.002)
        os.kill(actor_of(umbra_session, "vllm")["pid"], signal.SIGKILL)
        with pytest.raises(ActorDied, match="killed by SIGKILL"):
            starting.result(60.0)

    assert not shared_names() - before


def shared_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.mp-"))}
