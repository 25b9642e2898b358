"""Real rollouts for tests: a supervised session, echo engines, a manager and reward workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ledger_replay import replay
from rollout_configs import rollout_config
from saved_tokenizer import save_rust_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.cluster.placement import PoolMode
from umbra.runtime.errors import UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.rollout.rollout_config import RolloutConfig
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

VOCAB_SIZE = 64
USER_CODE = Path(__file__).parent
_LOOK_S = 0.002
"""Between two questions to the manager, which would otherwise answer all the time."""


def write_tokenizer(path: Path, end_token_ids: Sequence[int] = (0,)) -> None:
    """A tokenizer whose token i reads `t<i>`; token 0 is special. A chat is the variable `word` and
    the first message."""
    tokenizer: Any = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["t0"])
    save_rust_tokenizer(path, tokenizer, end_token_ids, "{{ word }} {{ messages[0].content }}")


class LiveRollouts:
    """Starts everything, calls the manager as `world_size` ranks, publishes weights.

    Args:
        reward, agent: names in `user_rewards` and `user_agents`.
        engine: settings of the echo engines.
        pool: changes to the PoolSpec, such as other engines than echo.
        weights: what `publish` carries; by default a tensor of no use.
        config: changes to the manager's settings.
        worker: changes to the workers' settings.
        later_workers: names of workers that the test starts itself, by `start_worker`.
        max_restarts: of each process.
        hung_limit_s: of the manager.
        manager: its class.
    """

    def __init__(
        self,
        session: Session,
        folder: Path,
        *,
        num_engines: int = 2,
        pool_mode: PoolMode = "standalone",
        num_workers: int = 1,
        later_workers: Sequence[str] = (),
        world_size: int = 2,
        reward: str = "length",
        agent: str | None = None,
        engine: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        config: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        max_restarts: int = 5,
        hung_limit_s: float = 15.0,
        num_prompts: int = 8,
        manager: str = "umbra.runtime.rollout.manager.rollout_manager:RolloutManager",
    ) -> None:
        self.session = session
        self.world_size = world_size
        self.version = -1
        self.num_syncs_served = 0
        self.acts: list[Future[None]] = []  # the last rank calls after them
        self._weights = weights or {"w": torch.zeros(10)}
        self._folder = folder
        self.ledger_path = folder / "ledger" / "rollouts"
        self._write_prompts(num_prompts)
        restart = RestartPolicy(
            mode="on_failure", max_restarts=max_restarts, backoff_initial_s=0.05, backoff_max_s=0.2
        )
        spec: dict[str, Any] = {
            "engine": "umbra.engines.echo.echo_engine:EchoEngine",
            "kwargs": {"vocab_size": VOCAB_SIZE, "tick_ms": 10.0, **(engine or {})},
            **(pool or {}),
        }
        session.create_pool(
            PoolSpec(name="policy", count=num_engines, mode=pool_mode, restart=restart, **spec)
        )
        names = [f"rewards-{idx}" for idx in range(num_workers)]
        self._worker_config: dict[str, Any] = {
            "tokenizer_path": str(folder / "tokenizer.json"),
            "rewards": {"": f"user_rewards:{reward}"} if reward else {},
            "agent": f"user_agents:{agent}" if agent else None,
            "sys_path": [str(USER_CODE)],
            **(worker or {}),
        }
        self._worker_restarts = restart
        for name in names:
            self.start_worker(name)
        self.manager: SyncHandle = session.spawn(
            ActorSpec(
                name="rollouts",
                target=manager,
                kwargs={"config": self._config([*names, *later_workers], agent, config or {})},
                sys_path=(str(USER_CODE),),
                restart=restart,
                hung_limit_s=hung_limit_s,
                role="manager",
            )
        )

    def _write_prompts(self, num_prompts: int) -> None:
        write_tokenizer(self._folder / "tokenizer.json")
        records: list[dict[str, Any]] = [
            {
                "id": f"p{i}",
                "prompt": f"t{i + 1}",
                "tokens": np.asarray([i + 1, 2, 3], "<i4").tobytes(),
                "row": {"answer": f"t{i}", "marker": str(self._folder / "marker")},
            }
            for i in range(num_prompts)
        ]
        write_prompts(self._folder / "prompts.msgpack", records)

    def start_worker(self, name: str, *, node: int | None = None, **changes: Any) -> None:
        """Starts a rollout worker, on the node of that index.

        Args:
            changes: of its settings.
        """
        spec = ActorSpec(
            name=name,
            target="umbra.runtime.rollout.agents.rollout_worker:RolloutWorker",
            kwargs={"config": self._worker_config | changes},
            restart=self._worker_restarts,
            frees_main_thread=True,
        )
        self.session.spawn(spec, node=node)

    def _config(
        self, workers: Sequence[str], agent: str | None, changes: dict[str, Any]
    ) -> RolloutConfig:
        prompts = str(self._folder / "prompts.msgpack")
        values: dict[str, Any] = {
            "prompts_path": prompts,
            "eval_path": prompts,
            "world_size": self.world_size,
            "groups_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 64,
            "max_context_len": 256,
            "worker_names": tuple(workers),
            "agent": f"user_agents:{agent}" if agent else None,
            "rank_timeout_s": 60.0,
            "engine_timeout_s": 30.0,
            "ledger_path": str(self.ledger_path),
        }
        return rollout_config(**values | changes)

    # -- as the trainer ------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Brings the engines that lack it to `version`."""
        self.version = version
        publisher = WeightPublisher(self.session, self._weights)
        publisher.publish("policy", version, 20.0)

    def announce(self, version: int, step: int) -> None:
        """Announces the next version."""
        self.manager.call("announce", version, step)

    def next_batch(self, step: int) -> list[dict[str, Any]]:
        """Every rank's batch; serves syncs on the way, as `Rollouts` does."""
        return self._collect("next_batch", step, max(0, self.version))

    def evaluate(self, step: int) -> list[dict[str, Any]]:
        return self._collect("evaluate", step)

    def _collect(self, method: str, *arguments: int) -> list[dict[str, Any]]:
        while True:
            answers = self.call_as_ranks(
                lambda rank: self.manager.call(method, rank, *arguments, timeout_s=60.0)
            )
            kinds = {answer["kind"] for answer in answers}
            assert len(kinds) == 1, kinds
            if kinds != {"sync_wanted"}:
                return answers
            assert {answer["version"] for answer in answers} == {self.version}
            self.num_syncs_served += 1
            self.publish(self.version)

    def call_as_ranks(self, call: Callable[[int], Any]) -> list[Any]:
        """The results of `call(rank)` for each rank, called concurrently."""

        def call_in_order(rank: int) -> Any:
            if rank == self.world_size - 1:
                wait(self.acts, 60.0)
            return call(rank)

        with ThreadPoolExecutor(self.world_size) as ranks:
            return list(ranks.map(call_in_order, range(self.world_size)))

    # -- looking and breaking ------------------------------------------------------------

    def processes(self) -> dict[str, dict[str, Any]]:
        rows: list[dict[str, Any]] = self.session.supervisor_call("list_actors")
        return {row["name"]: row for row in rows}

    def signal(self, name: str, signum: int) -> None:
        os.kill(self.processes()[name]["pid"], signum)

    def replace_manager(self) -> None:
        """SIGKILLs the manager; returns when its successor is up."""
        lost = self.processes()["rollouts"]["incarnation"]
        self.signal("rollouts", signal.SIGKILL)
        self.session.supervisor_call("resolve", "rollouts", 60.0, lost, timeout_s=61.0)

    def failure_of_next_batch(self, rank: int, step: int) -> UmbraError:
        """The error that a rank gets instead of a batch."""
        try:
            answer = self.manager.call(
                "next_batch", rank, step, max(0, self.version), timeout_s=60.0
            )
        except UmbraError as error:
            return error
        raise AssertionError(f"rank {rank} got {answer['kind']} instead of an error")

    def wait_for_call(self, name: str) -> None:
        """Returns once a rank waits for it."""
        deadline = time.monotonic() + 60.0
        while (found := self.manager.call("stats")["call"]) != name:
            assert time.monotonic() < deadline, found
            time.sleep(_LOOK_S)

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Returns once the manager has so many tokens of the batch in progress."""
        deadline, found = time.monotonic() + 60.0, 0
        while found < num_tokens:
            assert time.monotonic() < deadline, f"{found} tokens"
            time.sleep(_LOOK_S)
            stats = self.manager.call("stats")
            parts = [stats["training"], stats["evaluation"] or {"tokens": 0}]
            found = sum(part["tokens"] for part in parts)


@contextmanager
def while_generating(
    live: LiveRollouts, num_tokens: int, act: Callable[[], None]
) -> Generator[None]:
    """Acts, in another thread, once the block's batch has so many tokens, and before it is given
    to the ranks: the last one asks for it after the act."""

    def wait_and_act() -> None:
        live.wait_for_tokens(num_tokens)
        act()

    with ThreadPoolExecutor(1) as side:
        acting = side.submit(wait_and_act)
        live.acts.append(acting)
        yield
        acting.result(60.0)
        live.acts.remove(acting)


@contextmanager
def killing(live: LiveRollouts, name: str, *, after_tokens: int) -> Generator[None]:
    """SIGKILLs a process once the block's batch has so many tokens."""
    with while_generating(live, after_tokens, lambda: live.signal(name, signal.SIGKILL)):
        yield


def ledger_of(live: LiveRollouts) -> LedgerState:
    """The ledger's state on disk, once everything so far is durable."""
    live.manager.call("position")
    return replay(read_history(live.ledger_path).entries)


def rewards_of_group(batch: dict[str, Any], idx: int) -> list[float]:
    """The rewards of the whole group of a rank's sample."""
    own = batch["reward_indices"][idx]
    bounds: list[int] = batch["group_offsets"].tolist()
    (group,) = (span for span in pairwise(bounds) if span[0] <= own < span[1])
    (rewards,) = batch["group_rewards"]
    return rewards[slice(*group)].tolist()


def merged(batches: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """sample id -> its tokens, versions, logprobs, reward, group and so on, over all ranks."""
    samples: dict[str, dict[str, Any]] = {}
    for batch in batches:
        bounds = batch["offsets"].tolist()
        for idx, sample_id in enumerate(batch["sample_ids"]):
            assert sample_id not in samples, "a sample on two ranks"
            own = slice(bounds[idx], bounds[idx + 1])
            mask = batch["mask"][own].astype(bool)
            samples[sample_id] = {
                "tokens": batch["tokens"][own].tolist(),
                "completion": batch["tokens"][own][batch["prompt_lens"][idx] :].tolist(),
                "versions": batch["versions"][own][mask].tolist(),
                "logprobs": batch["logprobs"][own][mask].tolist(),
                "mask": batch["mask"][own].tolist(),
                "reward": float(batch["rewards"][idx]),
                "group_rewards": rewards_of_group(batch, idx),
                "group": batch["group_ids"][idx],
                "finish_reason": batch["finish_reasons"][idx],
            }
    return samples
