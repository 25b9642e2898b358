"""An actor's socket without umbra's client."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq

from umbra.runtime.rpc.wire import RESULT, ActorRef


class RawSocket:
    """A bare DEALER, for what no client of ours would send."""

    def __init__(self, ref: ActorRef) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = 10_000
        self._socket.sndtimeo = 10_000
        self._socket.connect(ref.ipc_endpoint)

    def __enter__(self) -> zmq.Socket[bytes]:
        return self._socket

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
        self._context.term()


def receive_result(socket: zmq.Socket[bytes], call_id: int) -> Any:
    """The value of that call; what else arrives is passed over."""
    while True:
        unpacker = msgpack.Unpacker(raw=False)
        unpacker.feed(socket.recv_multipart()[0])
        for envelope in unpacker:
            if envelope[:2] == [RESULT, call_id]:
                return envelope[2]
