"""The processes of a chaos run, and its ranks, which ask for batches and publish weights."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import frequent_snapshots
import torch
from chaos_oracle import Oracle, prompt_id
from chaos_plan import (
    HUNG_LIMIT_S,
    INJECTED,
    MANAGER,
    MAX_CONTEXT_LEN,
    MAX_NEW_TOKENS,
    POOL,
    STOP_TOKEN,
    VOCAB_SIZE,
    WORKERS,
    ChaosPlan,
)
from chaos_saboteur import ChaosError, DeathNotes
from ledger_replay import replay
from rollout_configs import rollout_config
from saved_tokenizer import save_rust_tokenizer
from session_rank import SessionRank
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder, read_history
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

T = TypeVar("T")

_BATCH_TIMEOUT_S: Final = 120.0
_SYNC_TIMEOUT_S: Final = 60.0
_SETTLE_TIMEOUT_S: Final = 60.0
_LEDGER_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_START_TIMEOUT_S: Final = 10.0
"""Also the time from SIGSTOP to the replacement of an engine that has not begun to serve."""
_RESTARTS: Final = RestartPolicy(
    mode="on_failure", max_restarts=100_000, backoff_initial_s=0.05, backoff_max_s=0.2
)
"""Processes die as often as planned, which must not count as a crash loop."""
_ENGINE: Final[dict[str, Any]] = {
    "inner": "echo",
    "vocab_size": VOCAB_SIZE,
    "weights_in_logprobs": True,
    # A trajectory takes half a second, so most faults hit some of them halfway.
    "tokens_per_s": 120.0,
    "max_num_seqs": 32,
    "tick_ms": 20.0,
    "max_context_len": MAX_CONTEXT_LEN,
}
_BUCKET_NBYTES: Final = 256 << 10
"""The weights take several buckets, so that a sync may be cut in the middle."""


class ChaosWorld:
    """Starts everything in a session, and runs the ranks, each in a thread of its own.

    Only one thread at a time may call it, except for `num_finished`.

    Attributes:
        num_catch_ups: syncs that waiting ranks were asked for.
    """

    def __init__(self, session: Session, plan: ChaosPlan, oracle: Oracle, folder: Path) -> None:
        self.num_catch_ups = 0
        self.interruptions = 0
        self._session = session
        self._plan = plan
        self._oracle = oracle
        self._folder = folder
        self._ledger_path = ledger_folder(folder.absolute(), MANAGER)
        self._version = -1
        # Not joined: the threads' waits end with the session at the latest.
        self._threads = ThreadPoolExecutor(plan.num_ranks, "rank")
        self._tensors = {
            name: torch.zeros(tensor.shape) for name, tensor in oracle.weights(0).items()
        }
        self._publishers = [
            WeightPublisher(SessionRank(session, rank, plan.num_ranks), self._tensors)
            for rank in range(plan.num_ranks)
        ]
        self._start_pool()
        for name in WORKERS:
            session.spawn(self._worker_spec(name))
        self._manager = self._start_manager()

    def _start_pool(self) -> None:
        plan = self._plan
        spec = PoolSpec(
            name=POOL,
            engine=engine_target("faulty"),
            count=plan.num_engines,
            mode="standalone",
            kwargs={**_ENGINE, "seed": plan.seed, "faults": [dict(fault) for fault in INJECTED]},
            restart=_RESTARTS,
            hung_limit_s=HUNG_LIMIT_S,
            start_timeout_s=_START_TIMEOUT_S,
            on_update=plan.on_update,
            bucket_nbytes=_BUCKET_NBYTES,
        )
        self._session.create_pool(spec)

    def _worker_spec(self, name: str) -> ActorSpec:
        write_tokenizer(self._folder / "tokenizer.json")
        return ActorSpec(
            name=name,
            target="umbra.runtime.rollout.agents.rollout_worker:RolloutWorker",
            kwargs={
                "config": {
                    "tokenizer_path": str(self._folder / "tokenizer.json"),
                    "rewards": {"": "chaos_reward:reward"},
                    "sys_path": [str(Path(__file__).parent)],
                }
            },
            restart=_RESTARTS,
            hung_limit_s=HUNG_LIMIT_S,
            frees_main_thread=True,
        )

    def _start_manager(self) -> SyncHandle:
        plan, path = self._plan, self._folder / "prompts.msgpack"
        write_prompts(
            path,
            (
                {"id": prompt_id(idx), "prompt": "", "tokens": tokens.tobytes(), "row": {}}
                for idx, tokens in enumerate(self._oracle.prompts)
            ),
        )
        config = rollout_config(
            prompts_path=str(path),
            pool=POOL,
            world_size=plan.num_ranks,
            groups_per_step=plan.groups_per_batch,
            group_size=plan.group_size,
            max_new_tokens=MAX_NEW_TOKENS,
            max_context_len=MAX_CONTEXT_LEN,
            stop_token_ids=(STOP_TOKEN,),
            worker_names=tuple(WORKERS),
            seed=plan.seed,
            max_staleness=plan.max_staleness,
            max_inflight_per_engine=48,
            delta_timeout_s=10.0,
            ledger_path=str(self._ledger_path),
        )
        spec = ActorSpec(
            name=MANAGER,
            target="frequent_snapshots:FrequentSnapshots",
            kwargs={"config": config},
            sys_path=(str(Path(frequent_snapshots.__file__).parent),),
            restart=_RESTARTS,
            hung_limit_s=HUNG_LIMIT_S,
        )
        return self._session.spawn(spec)

    # -- as the ranks --------------------------------------------------------------------

    def publish(self, version: int, step: int) -> None:
        """Publishes a version: the weights after `step` steps."""
        self._manager.call("announce", version, step, timeout_s=_LEDGER_TIMEOUT_S)
        for name, tensor in self._oracle.weights(version).items():
            self._tensors[name].copy_(torch.as_tensor(tensor))
        self._version = version
        self._as_ranks(self._publish)

    def next_batch(self, step: int) -> list[dict[str, Any]]:
        """All ranks' parts of a batch; serves syncs that are requested meanwhile."""
        answers = self._as_ranks(lambda rank: self._batch_of(rank, step))
        self.interruptions += int(answers[0]["metrics"]["interruptions"])
        return answers

    def _as_ranks(self, act: Callable[[int], T]) -> list[T]:
        return list(self._threads.map(act, range(self._plan.num_ranks)))

    def _batch_of(self, rank: int, step: int) -> dict[str, Any]:
        # Each rank asks separately: an answer may reach only one of them if the manager dies.
        while True:
            arguments = (rank, step, self._version)
            answer = self._manager.call("next_batch", *arguments, timeout_s=_BATCH_TIMEOUT_S)
            if answer["kind"] == "batch":
                return answer
            if answer != {"kind": "sync_wanted", "version": self._version}:
                raise ChaosError(f"rank {rank} got {answer} at version {self._version}")
            self.num_catch_ups += rank == 0
            self._publish(rank)

    def _publish(self, rank: int) -> None:
        """Publishes the current version to the engines that lack it."""
        self._publishers[rank].publish(POOL, self._version, _SYNC_TIMEOUT_S)

    # -- state ---------------------------------------------------------------------------

    def num_finished(self) -> int:
        """Number of trajectories that are finished, delivered or not."""
        training = self.stats()["training"]
        return training["groups_admitted"] * self._plan.group_size - training["trajectories_open"]

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._manager.call("stats")
        return stats

    def ledger(self) -> LedgerState:
        """The ledger's state on disk, once everything so far is durable."""
        self._manager.call("position", timeout_s=_LEDGER_TIMEOUT_S)
        return replay(read_history(self._ledger_path).entries)

    def settle(self, deaths: DeathNotes, fatal: Collection[str]) -> None:
        """Waits until these deaths were reported and every engine serves the current weights.

        Raises:
            ChaosError: with what is missing.
        """
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            unreported = sorted(set(fatal) - deaths.how.keys())
            states = self._session.pool(POOL).states()
            serving = [
                row["engine"]
                for row in states
                if row["state"] == EngineState.SERVING and row["version"] == self._version
            ]
            if not unreported and len(serving) == self._plan.num_engines:
                return
            if time.monotonic() > deadline:
                raise ChaosError(
                    f"{_SETTLE_TIMEOUT_S:g} s after the last fault the deaths of {unreported} are "
                    f"not reported, and of {self._plan.engines} only {serving} serve version "
                    f"{self._version}"
                )
            if any(row["state"] == EngineState.PENDING_WEIGHTS for row in states):
                self._as_ranks(self._publish)
            time.sleep(_POLL_S)


def injected_faults(log_dir: Path, engines: Sequence[str]) -> dict[str, int]:
    """Faults that engines report to have injected, by kind."""
    found: Counter[str] = Counter()
    for name in engines:
        text = (log_dir / f"{name}.log").read_text(errors="replace")
        found.update(
            re.findall(r"injecting a fault: (.*) at token \d+ \(due at \d+\)$", text, re.M)
        )
    return dict(found)


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer whose token i reads `t<i>`."""
    vocabulary = {f"t{i}": i for i in range(VOCAB_SIZE)}
    tokenizer: Any = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    save_rust_tokenizer(path, tokenizer)
