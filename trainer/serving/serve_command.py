"""`umbra serve` and `umbra generate`: run engines without a trainer, for clients or one prompt."""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.cluster.environment import api_key
from umbra.runtime.errors import ConfigError, how_to_install
from umbra.runtime.package_versions import is_installed
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.dispatch.generator import GeneratedPiece
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.trainer.checkpoint.run_dir import RunLock
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.services.services import POOL, starting_engines
from umbra.trainer.services.setup_check import check_models
from umbra.trainer.serving.choice import StepWriter
from umbra.trainer.serving.served_config import (
    alone,
    plan_served,
    pool_specs,
    read_one_engine_config,
    read_serve_config,
    served_pools,
    trained_instead,
)
from umbra.trainer.serving.served_pool import ModelText, ServedPoolConfig
from umbra.trainer.world.run_files import check_writable
from umbra.trainer.world.signals import StopRequested, StopSignals

_FRONT: Final = "front"
_GENERATOR: Final = "generator"
# Clients reconnect, and the engines keep running meanwhile.
_FRONT_RESTARTS: Final = RestartPolicy(mode="on_failure", max_restarts=5, window_s=600.0)
# More than the server takes to answer all who wait (`umbra.trainer.serving.http_front`).
_FRONT_GRACE_S: Final = 12.0
_LOOK_S: Final = 3600.0
"""Length of one wait for the end; waits repeat."""
_SHUTDOWN_GRACE_S: Final = 5.0
"""Time for engines and requests in progress to end."""
_STOP_GRACE_S: Final = 20.0
"""Time from a signal to the forced end of this process; longer than an orderly end takes."""


def serve(arguments: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, the regular end of a server, and returns 0. Raises
    ConfigError or DataError for a wrong setting, model directory or address, another UmbraError if
    engines cannot be kept running."""
    if not is_installed("aiohttp"):
        raise ConfigError(f"umbra serve needs aiohttp: {how_to_install('serve')}")
    config = read_serve_config(arguments.config, arguments.overrides)
    check_models(config)
    pools = served_pools(config)
    host = arguments.host
    key = api_key(arguments.api_key)
    run_dir = config.run.dir / "serve"
    check_writable(run_dir)

    started: list[PoolSpec] = []

    def engine_pools() -> list[PoolSpec]:
        plan = plan_served(config)
        for line in plan.table():
            print(line, file=sys.stderr)
        started.extend(pool_specs(config, plan))
        return started

    def work(session: Session, _: ProgressDisplay) -> None:
        at_host, at_port = session.actor(_FRONT).call("address")
        shown = f"[{at_host}]" if ":" in at_host else at_host
        names = " and ".join(
            ", ".join(model for pool in pools for model in pool.models).rsplit(", ", 1)
        )
        print(
            f"{names} {'are' if ' and ' in names else 'is'} served at http://{shown}:{at_port}/v1"
        )
        if (trained := trained_instead(config)) is not None:
            print(f"the training in {config.run.dir} is not served: model.path={trained} does that")
        print(f"engines: {_describe_engines(started)}; logs: {run_dir / 'logs'}")
        if not key and not _is_loopback(at_host):
            print("anybody who can reach this address can use it: set --api-key")
        print("Ctrl-C ends it", flush=True)
        while True:
            session.raise_if_lost(_LOOK_S)  # raises as soon as the job is lost

    with _reserved(host, arguments.port) as reserved, RunLock(run_dir):
        front = _front_spec(pools, host, int(reserved.getsockname()[1]), key)
        with_pools(engine_pools, run_dir, [front], work)
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Prints one completion; the exit status is 128 + signal if one ended it. Raises as `serve`."""
    config, pool = read_one_engine_config(
        arguments.config, arguments.overrides, arguments.pool, arguments.engine
    )
    check_models(config, only=pool.section)
    text = pool.open_text()
    tokens = _encode(text, arguments, pool)
    spec = ActorSpec(
        name=_GENERATOR,
        target="umbra.runtime.rollout.dispatch.generator:GeneratorService",
        kwargs={"config": replace(pool.dispatch, shares_memory=False)},
    )

    def work(session: Session, _: ProgressDisplay) -> None:
        generator = session.actor(_GENERATOR)
        writer = StepWriter(text.decode, text.stops)
        asked = (tokens, arguments.max_tokens, arguments.temperature, text.stop_token_ids)
        for piece in generator.stream("stream", *asked, arguments.seed, timeout_s=None):
            step = writer.write(GeneratedPiece(**piece))
            print(step.text, end="", flush=True)
            if step.finish_reason:
                break
        print()

    def engine_pools() -> list[PoolSpec]:
        return [alone(config, pool.pool)]

    with tempfile.TemporaryDirectory(prefix="umbra-generate-") as folder:
        return with_pools(engine_pools, Path(folder), [spec], work)


def _front_spec(pools: Sequence[ServedPoolConfig], host: str, port: int, key: str) -> ActorSpec:
    return ActorSpec(
        name=_FRONT,
        target="umbra.trainer.serving.http_front:HttpFront",
        kwargs={
            "pools": list(pools),
            "host": host,
            "port": port,
            "api_key": key,
        },
        restart=_FRONT_RESTARTS,
        grace_s=_FRONT_GRACE_S,
    )


def _encode(
    text: ModelText, arguments: argparse.Namespace, pool: ServedPoolConfig
) -> NDArray[np.int32]:
    if arguments.chat:
        messages = [{"role": "user", "content": arguments.prompt}]
        tokens = text.encode_chat_now(messages, pool.template_variables)
    else:
        tokens = text.encode_now(arguments.prompt)
    limit = pool.dispatch.max_context_len
    if not 0 < len(tokens) < limit:
        raise ConfigError(
            f"--prompt has {len(tokens)} tokens; the context holds {limit} "
            f"({pool.section}.max_context_len), and at least one must be left for the completion"
        )
    return np.asarray(tokens, np.int32)


def _describe_engines(pools: Sequence[PoolSpec]) -> str:
    """`2 vllm; judge: 1 embedded, time-sliced`."""
    parts: list[str] = []
    for pool in sorted(pools, key=lambda pool: pool.name != POOL):
        whose = "" if pool.name == POOL else f"{pool.name}: "
        how = ", time-sliced" if pool.mode == "colocated" else ""
        parts.append(f"{whose}{pool.count} {pool.engine}{how}")
    return "; ".join(parts)


def _reserved(host: str, port: int) -> socket.socket:
    """A socket bound to `port`, or for 0 to a free one, which a restarted front must keep. It does
    not listen, so that the front can; nobody else gets the port while it is open. Raises
    ConfigError if the address cannot be bound, before engines start."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with ExitStack() as opened:
            reserved = opened.enter_context(socket.socket(family, kind, protocol))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
            opened.pop_all()
            return reserved
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose others with --host "
            "and --port"
        ) from error


def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback


def with_pools(
    pools: Callable[[], Sequence[PoolSpec]],
    run_dir: Path,
    actors: Sequence[ActorSpec],
    work: Callable[[Session, ProgressDisplay], None],
) -> int:
    """Runs `work` in this process, without a trainer, while the pools' engines, which load their
    models, and `actors` serve. No process of them is left afterwards.

    Returns 0, or 128 + the signal's number if SIGINT or SIGTERM ended it. Raises the UmbraError of
    `work` or of a failed start, and JobFailed if engines and actors cannot be kept running.
    """
    settings = SessionConfig(run_dir=run_dir, shutdown_grace_s=_SHUTDOWN_GRACE_S)
    with (
        ProgressDisplay(sys.stderr) as display,
        StopSignals(_STOP_GRACE_S) as signals,
        # Blocked calls of the session raise the failure, and `work` always is in one.
        Session.from_torchrun(
            settings, on_note=display.note, on_failed=lambda _: None, on_signal=signals.pass_in
        ) as session,
    ):
        signals.defer(session.pass_on_signal)
        try:
            with signals.interruptible():
                _start(session, display, pools(), actors)
                work(session, display)
        except StopRequested:
            pass
    return signals.exit_status


def _start(
    session: Session,
    display: ProgressDisplay,
    pools: Sequence[PoolSpec],
    actors: Sequence[ActorSpec],
) -> None:
    """Starts pools and actors at the same time, so that the actors' errors come early. In the
    supervisor, pools that share memory wait for each other."""

    def create(pool: PoolSpec, others_s: float) -> None:
        with starting_engines(display, session, pool):
            session.create_pool(pool, others_s=others_s)

    all_s = sum(pool.start_timeout_s for pool in pools)
    executor = ThreadPoolExecutor(len(pools), "umbra-start")
    try:
        engines = [
            executor.submit(create, pool, others_s=all_s - pool.start_timeout_s) for pool in pools
        ]
        for actor in actors:
            session.spawn(actor)
        for started in as_completed(engines):
            started.result()
    finally:
        executor.shutdown(wait=False)  # after an error, the session ends the starts in progress
