"""Records what processes of a real session send to each other, as seeds for mutations.

A session starts a pool of one echo engine, publishes weights to it and reads a stream of tokens.
What this process sends and receives is recorded where it enters and leaves ZMQ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch
import zmq

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.errors import UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.loop_socket import LoopSocket
from umbra.runtime.rpc.wire import Encoder, Frame
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.testing.factories import SessionFactory
from umbra.runtime.weights.rank_exports import (
    Allocation,
    ChunksHandle,
    RankExports,
    TensorPart,
)
from umbra.runtime.weights.sync_messages import SyncAbort, SyncBegin

Message: TypeAlias = list[bytes]
"""A header and its frames, without the identity of a peer."""

_PROGRAMS: Final = Path(__file__).parents[2] / "process/programs"
_TIMEOUT_S: Final = 20.0


def record_traffic(folder: Path) -> list[Message]:
    """Every distinct message of a short session, in both directions, and a heartbeat."""
    with pytest.MonkeyPatch.context() as monkeypatch, _recorded(monkeypatch) as messages:
        with SessionFactory(folder, monkeypatch) as factory:
            session = factory()
            _start_processes(session)
            _publish_weights(session)
            _read_tokens(session)
            beat = _read_heartbeat(session)
        return [list(frames) for frames in dict.fromkeys(map(tuple, [*messages, beat]))]


@contextmanager
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Generator[list[Message]]:
    messages: list[Message] = []
    send: Callable[[LoopSocket, Sequence[Frame]], None] = LoopSocket.send
    receive: Callable[[LoopSocket], list[Frame]] = getattr(LoopSocket, "_receive")  # noqa: B009

    def record(socket: LoopSocket, frames: Sequence[Frame]) -> None:
        if socket.raw.type == zmq.DEALER:  # not a monitor
            messages.append([bytes(frame) for frame in frames])

    def recorded_send(self: LoopSocket, frames: Sequence[Frame]) -> None:
        record(self, frames)
        send(self, frames)

    def recorded_receive(self: LoopSocket) -> list[Frame]:
        frames = receive(self)
        record(self, frames)
        return frames

    monkeypatch.setattr(LoopSocket, "send", recorded_send)
    monkeypatch.setattr(LoopSocket, "_receive", recorded_receive)
    yield messages


def _start_processes(session: Session) -> None:
    echo = session.spawn(ActorSpec(name="echo", target="actors:Echo", sys_path=(str(_PROGRAMS),)))
    echo.call("who")
    session.create_pool(
        PoolSpec(
            name="policy",
            engine="umbra.engines.echo.echo_engine:EchoEngine",
            kwargs={"tick_ms": 5.0, "tokens_per_s": 400.0, "max_context_len": 8192},
            count=1,
            mode="standalone",
        )
    )
    session.pool("policy").states()


def _publish_weights(session: Session) -> None:
    weights = {
        "embed": torch.arange(600, dtype=torch.float32).reshape(20, 30),
        "norm": torch.ones(30, dtype=torch.bfloat16),
        "scale": torch.tensor(0.5),
    }
    weights["head"] = weights["embed"]
    publisher = WeightPublisher(session, weights)
    publisher.publish("policy", 1, _TIMEOUT_S)
    deadline = time.monotonic() + _TIMEOUT_S
    exports = RankExports(
        allocations=(
            Allocation(b"\1" * 16, b"\2" * 64, 1 << 20, 7),
            Allocation(b"\1" * 16, ChunksHandle("/tmp/fds", "3" * 32, 8), 1 << 24, 8),
        ),
        parts=(
            TensorPart(0, 0, 512, "float32", (20, 30), (30, 1)),
            TensorPart(2560, 0, 8192, "bfloat16", (30,), (1,)),
            TensorPart(2816, 1, 16384, "float32", (), ()),
        ),
    )
    # There is no such pool: without a GPU these exports could not be read.
    begin = SyncBegin(
        pool="elsewhere",
        version=2,
        rank=0,
        world_size=1,
        manifest=publisher.manifest.to_wire(),
        offers={"cuda_ipc": exports.to_wire(), "tcp": "127.0.0.1:4000"},
        node_id=session.node_id,
        deadline=deadline,
    )
    abort = SyncAbort(sync_id="elsewhere-1", rank=0, reason="it failed", deadline=deadline)
    with pytest.raises(UmbraError):
        session.sync(begin)
    with pytest.raises(UmbraError):
        session.sync(abort)


def _read_tokens(session: Session) -> None:
    engine = session.actor("policy-0")
    batches = engine.stream("deltas", timeout_s=_TIMEOUT_S, credits=2)
    next(batches)
    request: dict[str, Any] = {
        "id": 7,
        "tokens": np.full(5000, 3, np.int32),  # large enough for a frame of its own
        "position": 0,
        "seed": 3,
        "max_new_tokens": 20,
        "temperature": 1.0,
        "stop_token_ids": [],
    }
    engine.call("submit", [request])
    while not len(next(batches)["finished_ids"]):
        pass
    batches.close()


def _read_heartbeat(session: Session) -> Message:
    """In the form of a result, because its socket carries no envelopes."""
    with zmq.Context[Any]() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(_TIMEOUT_S * 1000)
        socket.connect(f"ipc://{session.socket_dir / 'policy-0.1.hb'}")
        socket.send(b"")
        beat: bytes = socket.recv()
    header, _ = Encoder().encode((5, 1, beat))
    return [header]
