"""Messages that no client of ours would send: they are dropped, and the actor lives."""

from __future__ import annotations

import msgpack
import pytest
from raw_socket import RawSocket, receive_result
from rpc_fixtures import *  # noqa: F403 - the fixtures
from rpc_process import ActorProcess

from umbra.runtime.rpc.wire import CALL, CANCEL, CREDIT, HELLO, RESULT

pytestmark = pytest.mark.process

ECHO = msgpack.packb([CALL, 99, 1, "echo", ["alive"], {}, 5000, 0])


def echo_of_extension(code: int, fields: tuple[object, ...]) -> list[bytes]:
    extension = msgpack.ExtType(code, msgpack.packb(fields))
    return [msgpack.packb([CALL, 1, 1, "echo", [extension], {}, 5000, 0])]


MALFORMED: list[list[bytes]] = [
    [b""],
    [b"\xc1"],
    [b"\x91" * 5000],
    [b"\x91" * 1000 + b"\x00"],
    [msgpack.packb("\udcff" * 1000, unicode_errors="surrogateescape")],
    [msgpack.packb("text")],
    [msgpack.packb([])],
    [msgpack.packb([CALL])],
    [msgpack.packb([CALL, 1, 1, "echo", [1], {}, 5000])],
    [msgpack.packb([CALL, "1", 1, "echo", [1], {}, 5000, 0])],
    [msgpack.packb([CALL, 1, 1, "echo", [1], {}, -5, -5])],
    [msgpack.packb([CALL, 1, 1, "sleep", [0], {}, 2**63, 0])],
    [msgpack.packb([CALL, 1, 1, "numbers", [5], {}, 0, 2**63])],
    [msgpack.packb([CALL, 1, 1, "echo", [1], {b"\xff": 1}, 5000, 0])],
    [msgpack.packb([RESULT, 1, "from a caller"])],
    [msgpack.packb([CANCEL, 12345]), msgpack.packb([CREDIT, 12345, 5])],
    [msgpack.packb([CREDIT, 1, -(2**62)])],
    [msgpack.packb([255, 1])],
    [msgpack.packb([True])],
    echo_of_extension(3, ("<f4", [9], 7)),
    echo_of_extension(2, ("O", [1], b"12345678")),
    echo_of_extension(1, ("name", "many", "node", "ipc", 5)),
    echo_of_extension(99, ()),
    [ECHO[:-3]],
    [ECHO[:-1]],
    [ECHO, b"surplus frame", b""],
]  # fmt: skip


@pytest.mark.parametrize("frames", MALFORMED, ids=repr)
def test_malformed_messages_are_dropped_and_the_actor_lives(
    shared: ActorProcess, frames: list[bytes]
) -> None:
    with RawSocket(shared.ref) as hostile, RawSocket(shared.ref) as honest:
        hostile.send_multipart(frames)  # pyright: ignore[reportUnknownMemberType]
        hostile.send(msgpack.packb([HELLO]))
        hostile.recv_multipart()
        honest.send(ECHO)
        assert receive_result(honest, 99) == "alive"
        hostile.send(ECHO)
        assert receive_result(hostile, 99) == "alive"


def test_a_flood_of_garbage_takes_few_lines_of_the_log(actor: ActorProcess) -> None:
    num_sent = 20_000
    with RawSocket(actor.ref) as socket:
        for idx in range(num_sent):
            socket.send(MALFORMED[idx % len(MALFORMED)][0] + b"\xc1")
        socket.send(msgpack.packb([CALL, 100, 1, "echo", ["alive"], {}, 5000, 0]))
        assert receive_result(socket, 100) == "alive"

    actor.end()

    lines = [line for line in actor.log().splitlines() if "dropped" in line]
    assert f"{num_sent} in all" in lines[-1]
    assert len(actor.log()) < 10_000, actor.log()[:2000]
