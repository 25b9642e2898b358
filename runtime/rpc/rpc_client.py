"""Calls actors: the sending half of RPC.

A `Client` belongs to one event loop and keeps one DEALER socket to each actor it talks to.
Every call has exactly one outcome: its value, `RemoteError`, `DeadlineExceeded`,
`CancelledError`, `ConnectionLost` (the peer went away; it may or may not have acted) or
`ActorNotFound` (refused: stale incarnation or no such method; it never acted).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Self

import zmq

from umbra.runtime.errors import (
    ActorNotFound,
    ConnectionLost,
    DeadlineExceeded,
    MailboxClosed,
)
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.rpc_connection import Connection, ItemStream
from umbra.runtime.rpc.wire import (
    CALL,
    CANCEL,
    CREDIT,
    ActorRef,
)

# (the lost ref, seconds left) -> the incarnation that replaces it
Resolver = Callable[[ActorRef, float], Awaitable[ActorRef]]
# Interval of requests for a lost actor's new address: shorter burns CPU while the supervisor has
# not noticed the death yet, longer adds to the recovery.
_RESOLVE_INTERVAL_S: Final = 0.02
_MAX_TIMEOUT_S: Final = 1e9
# Time to send the last cancellations. Longer delays the end of a process whose peer is stopped.
_CLOSE_LINGER_MS: Final = 100
# Sockets of one client; a connection takes three (one to its actor, and the two ends
# of its monitor). libzmq's default of 1,023 ends at 341 connections. 65,535 is its limit, which
# costs a process 0.8 MB.
_MAX_SOCKETS: Final = 65_535

DESCRIBE: Final = "_describe_calls"
_MAX_CALLS: Final = 500
_MAX_TASKS: Final = 500
"""The oldest calls, and any tasks. More would add nothing and be slow to read."""
_MAX_LABEL_LEN: Final = 300

_WAITING: Final = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""The frame of a coroutine or generator, and the object it waits for."""


class Client:
    """Connections of one loop. An async context manager; closing fails pending calls. `node_id`,
    the caller's host, decides between ipc and tcp. The job's CURVE keys, for actors on other nodes,
    may be set later, before these are called."""

    def __init__(self, node_id: str, keys: CurveKeys | None = None) -> None:
        self.node_id = node_id
        self.keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._connections: dict[tuple[str, int, str], Connection] = {}
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Fails pending calls with `MailboxClosed` and releases every socket."""
        self._is_closed = True
        for connection in self._connections.values():
            connection.close(MailboxClosed("this client was closed"))
        self._connections.clear()
        # Not `term`, which would wait forever for a socket that was left open by mistake.
        self._context.destroy(linger=_CLOSE_LINGER_MS)

    def handle(
        self, ref: ActorRef, resolver: Resolver | None = None, *, awaits_start: bool = False
    ) -> Handle:
        """A handle that looks its actor up again by name once the peer is lost, if it can. An actor
        that does not listen is lost, unless the handle `awaits_start`."""
        return Handle(self, ref, resolver, awaits_start)

    def connection(self, ref: ActorRef, awaits_start: bool = False) -> Connection:
        """The live connection to `ref`; opens it if necessary. Raises ActorNotFound if this node
        can reach no endpoint of the actor, MailboxClosed on a closed client."""
        if self._is_closed:
            raise MailboxClosed("this client was closed")
        key = (ref.name, ref.incarnation, ref.node_id)
        connection = self._connections.get(key)
        if connection is None or connection.lost:
            endpoint = ref.endpoint_from(self.node_id)
            if not endpoint:
                raise ActorNotFound(f"{ref} has no endpoint reachable from node {self.node_id}")
            connection = Connection(self._context, ref, endpoint, self.keys, awaits_start)
            self._connections[key] = connection
        return connection

    def pending_calls(self) -> list[tuple[float, str]]:
        return [call for connection in self._connections.values() for call in connection.pending()]

    def drop(self, ref: ActorRef, reason: str) -> None:
        """Declares an incarnation dead: its pending calls fail with `ConnectionLost`."""
        connection = self._connections.pop((ref.name, ref.incarnation, ref.node_id), None)
        if connection is not None:
            connection.close(ConnectionLost(f"{ref}: {reason}"))


class Handle:
    """Calls one actor. Cheap to make; follows the actor to its next incarnation on loss."""

    def __init__(
        self,
        client: Client,
        ref: ActorRef,
        resolver: Resolver | None = None,
        awaits_start: bool = False,
    ) -> None:
        self._client = client
        self._resolver = resolver
        self._awaits_start = awaits_start
        self._connection: Connection | None = None
        self.ref = ref

    async def call(
        self, method: str, /, *args: object, timeout_s: float = 30.0, **kwargs: object
    ) -> Any:
        """Calls `method` and waits for its outcome.

        At most once, unless the actor declares the method idempotent: then it is retried on the
        next incarnation, or over a reconnect, within the same deadline. Raises RemoteError,
        DeadlineExceeded, ConnectionLost, ActorNotFound or MailboxClosed, and TypeError, ValueError
        or OverflowError for an argument without wire form.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            connection = self._connection
            if connection is None or not connection.is_open:
                connection = await self._connect(method, deadline)
            remaining_s = deadline - time.monotonic()
            if not 0 < remaining_s < _MAX_TIMEOUT_S:
                raise _bad_timeout(f"{self.ref}.{method}", remaining_s)
            call_id, future = connection.begin_call(method, args, kwargs, remaining_s)
            try:
                return await future
            except ConnectionLost:
                retry = method in connection.idempotent and self._resolver is not None
                # The connection is not lost: the callee raised the error about a peer of its own.
                if not (retry and connection.lost) or time.monotonic() >= deadline:
                    raise
            finally:
                connection.end_call(call_id)

    async def connect(self, timeout_s: float) -> asyncio.Event:
        """Connects; the event is set once that connection is lost."""
        connection = await self._connect("connect", time.monotonic() + timeout_s)
        return connection.ended

    async def _connect(self, method: str, deadline: float) -> Connection:
        """An open connection, to the actor's next incarnation if this one is lost."""
        lost = self._connection is not None and self._connection.lost
        while True:
            remaining_s = deadline - time.monotonic()
            if not 0 < remaining_s < _MAX_TIMEOUT_S:
                raise _bad_timeout(f"{self.ref}.{method}", remaining_s)
            if lost and self._resolver is not None:
                self.ref = await self._resolver(self.ref, remaining_s)
            connection = self._client.connection(self.ref, self._awaits_start)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await connection.wait_open()
            except TimeoutError:
                raise DeadlineExceeded(f"{self.ref}.{method}: not connected in time") from None
            except ConnectionLost:
                # Nothing has been sent, so a retry is safe whatever the method does.
                if self._resolver is None:
                    raise
                lost = True
                await asyncio.sleep(_RESOLVE_INTERVAL_S)
                continue
            self._connection = connection
            return connection

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        /,
        *args: object,
        timeout_s: float | None = 30.0,
        credits: int = 16,
        **kwargs: object,
    ) -> AsyncGenerator[AsyncGenerator[Any, None]]:
        """Opens a stream of items; leaving the block cancels the callee's generator.

        Args:
            timeout_s: longest wait for the next item; None waits forever.
            credits: items in flight at most; the callee stops when they are used up.

        Raises (while iterating):
            RemoteError, DeadlineExceeded, ConnectionLost, ActorNotFound, MailboxClosed.
        """
        if credits < 1:
            raise ValueError(f"credits is {credits}: a stream needs at least one")
        connection = self._connection
        if connection is None or not connection.is_open:
            wait_s = timeout_s if timeout_s is not None else 30.0
            connection = await self._connect(method, time.monotonic() + wait_s)
        call_id = connection.next_call_id()
        incarnation = connection.ref.incarnation
        connection.outbox.put((CALL, call_id, incarnation, method, args, kwargs, 0, credits))
        stream = connection.open_stream(call_id, method)
        items = self._items(connection, call_id, stream, method, timeout_s, credits)
        try:
            yield items
        finally:
            await items.aclose()
            connection.forget_stream(call_id)
            if not (stream.ended or stream.error or connection.lost):
                connection.outbox.put((CANCEL, call_id))

    async def _items(
        self,
        connection: Connection,
        call_id: int,
        stream: ItemStream,
        method: str,
        timeout_s: float | None,
        credits: int,
    ) -> AsyncGenerator[Any, None]:
        num_taken = 0
        while True:
            while not stream.items:
                if stream.error is not None:
                    raise stream.error
                if stream.ended:
                    return
                stream.arrived.clear()
                try:
                    async with asyncio.timeout(timeout_s):
                        await stream.arrived.wait()
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"{self.ref}.{method}: no item for {timeout_s} s"
                    ) from None
            item = stream.items.popleft()
            num_taken += 1
            if num_taken * 2 >= credits and not connection.lost:
                connection.outbox.put((CREDIT, call_id, num_taken))
                num_taken = 0
            yield item


def _bad_timeout(what: str, timeout_s: float) -> Exception:
    if timeout_s <= 0:
        return DeadlineExceeded(f"{what}: no time left to call")
    return ValueError(f"{what}: timeout_s must be a number of seconds below {_MAX_TIMEOUT_S:g}")


def describe_calls(client: Client, running: list[tuple[float, str]]) -> dict[str, Any]:
    """The answer to `DESCRIBE`: the process's calls in both directions, of which its server has
    `running`, and its tasks."""
    calls = sorted(client.pending_calls() + running, reverse=True)
    return {
        "calls": [[age_s, label[:_MAX_LABEL_LEN]] for age_s, label in calls[:_MAX_CALLS]],
        "tasks": _describe_tasks(),
    }


def _describe_tasks() -> list[str]:
    """The places where the tasks of all loops of this process wait, the innermost last. asyncio
    lists those of one loop only, and user code has a loop of its own."""
    objects: list[Any] = gc.get_objects()
    # Not isinstance, which asks each object for its class: proxies of user code may raise then.
    tasks: list[asyncio.Task[Any]] = [
        found for found in objects if issubclass(type(found), asyncio.Task)
    ]
    places = [_where(task) for task in tasks if not task.done()]
    return [place for place in places if place][:_MAX_TASKS]


def _where(task: asyncio.Task[Any]) -> str:
    places: list[str] = []
    inner: Any = task.get_coro()
    while True:
        names = next((names for names in _WAITING if hasattr(inner, names[0])), None)
        frame = getattr(inner, names[0]) if names else None
        if names is None or frame is None:
            break
        code = frame.f_code
        places.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        inner = getattr(inner, names[1])
    return " > ".join(places)
