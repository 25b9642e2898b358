"""Pools of echo engines that share memory, for tests that move them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from pool_log import assert_never_both_awake

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.testing.factories import SessionFactory

RESTART = RestartPolicy(
    mode="on_failure", max_restarts=5, backoff_initial_s=0.05, backoff_max_s=0.2
)


def spec(name: str, **settings: Any) -> PoolSpec:
    base: dict[str, Any] = {
        "engine": "umbra.engines.echo.echo_engine:EchoEngine",
        "count": 1,
        "mode": "standalone",
        "load_weights": True,
        "restart": RESTART,
    }
    return PoolSpec(name=name, **(base | settings))


def judge_spec(name: str = "judge", **settings: Any) -> PoolSpec:
    return spec(name, mode="colocated", shares_with="policy", **settings)


class Shared:
    """A policy and judges that share memory, and what the supervisor saw of them."""

    def __init__(
        self,
        factory: SessionFactory,
        policy: dict[str, Any] | None = None,
        judges: tuple[str, ...] = ("judge",),
        **judge: Any,
    ) -> None:
        self.session = factory(environ={"UMBRA_LOG_LEVEL": "DEBUG"})
        self._log = factory.run_dirs[-1] / "logs" / "supervisor.log"
        self._pools = ("policy", *judges)
        for name in judges:
            self.session.create_pool(judge_spec(name, **judge))
        self.session.create_pool(spec("policy", **(policy or {})))

    def publish(self, version: int) -> None:
        """Publishes a version, like the trainer."""
        weights = {"w": torch.zeros(10)}
        WeightPublisher(self.session, weights).publish("policy", version, 20.0)

    def versions(self) -> list[int]:
        return [row["version"] for row in self.session.pool("policy").states()]

    def has_work(self, pool: str, has_work: bool) -> None:
        self.session.supervisor_call("pool_has_work", pool, has_work)

    def state(self, pool: str) -> str:
        return str(self.session.pool(pool).states()[0]["state"])

    def wait_for(self, policy: str, judge: str) -> None:
        wait_until(lambda: (self.state("policy"), self.state("judge")) == (policy, judge))

    def wait_for_turn(self, pool: str) -> None:
        wait_until(lambda: self.state(pool) == "SERVING")

    def pid(self, name: str) -> int:
        rows = self.session.supervisor_call("list_actors")
        return next(int(row["pid"]) for row in rows if row["name"] == name)

    def incarnation(self, name: str) -> int:
        rows = self.session.supervisor_call("list_actors")
        return next(int(row["incarnation"]) for row in rows if row["name"] == name)

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def check_never_both_awake(self) -> None:
        assert_never_both_awake(self._log, self._pools)


def wait_until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
