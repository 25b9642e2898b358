"""Envelopes between callers and actors.

An envelope is a msgpack list whose first element is its kind. Callers send CALL, CANCEL and
CREDIT; actors send RESULT, ITEM, END, ERROR, REFUSED and PING. Several envelopes to one peer
may share a ZMQ message. Each call has exactly one outcome: RESULT, END, ERROR or REFUSED, or
what the caller decides by itself (deadline, cancellation, peer lost).

    [CALL, call_id, incarnation, method, args, kwargs, timeout_ms, credits]
    [CANCEL, call_id]          the caller no longer waits; the callee's task is cancelled
    [CREDIT, call_id, n]       the caller can take n more items of a stream
    [HELLO]                    asks for WELCOME
    [WELCOME, incarnation, idempotent]  names of the methods that may be retried
    [RESULT, call_id, value]
    [ITEM, call_id, value]     one item of a stream
    [END, call_id]             a stream is exhausted
    [ERROR, call_id, type, message, traceback]
    [REFUSED, call_id, reason] never ran: stale incarnation, unknown method
    [PING]                     actor to caller: checks that the caller is still connected

timeout_ms 0 means no deadline (streams only). credits 0 means a plain call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.errors import ProtocolError

CALL: Final = 0
CANCEL: Final = 1
CREDIT: Final = 2
HELLO: Final = 3
WELCOME: Final = 4
RESULT: Final = 5
ITEM: Final = 6
END: Final = 7
ERROR: Final = 8
REFUSED: Final = 9
PING: Final = 10

FIELD_TYPES: Final[dict[int, tuple[type, ...]]] = {
    CALL: (int, int, str, list, dict, int, int),
    CANCEL: (int,),
    CREDIT: (int, int),
    HELLO: (),
    WELCOME: (int, list),
    RESULT: (int, object),
    ITEM: (int, object),
    END: (int,),
    ERROR: (int, str, str, str),
    REFUSED: (int, str),
    PING: (),
}


class BadEnvelope(ProtocolError):
    """An envelope is malformed, but its call is known, so its sender can get an error."""

    def __init__(self, message: str, kind: int, call_id: int) -> None:
        super().__init__(message, kind, call_id)
        self.message = message
        self.kind = kind
        self.call_id = call_id

    def __str__(self) -> str:
        return self.message


_EXACT_TYPES: Final = {
    kind: (int, *types) for kind, types in FIELD_TYPES.items() if object not in types
}
_VALUE_KINDS: Final = frozenset({RESULT, ITEM})


def check_envelope(raw: Any) -> list[Any]:
    """Returns a well-formed envelope. Raises ProtocolError otherwise: `BadEnvelope`
    for a known call."""
    # `type(raw) is not list` would make type checkers treat the items as unknown.
    if raw.__class__ is not list or not raw:
        raise ProtocolError("an envelope must be a non-empty list")
    envelope: list[Any] = raw
    kind = envelope[0]
    if type(kind) is int:
        if kind in _VALUE_KINDS:
            if len(envelope) == 3 and type(envelope[1]) is int:
                return envelope
        elif tuple(map(type, envelope)) == _EXACT_TYPES.get(kind):
            return envelope
        if len(envelope) > 1 and type(envelope[1]) is int:
            raise BadEnvelope(_what_is_wrong(envelope, kind), kind, envelope[1])
    raise ProtocolError(_what_is_wrong(envelope, kind))


def _what_is_wrong(envelope: list[Any], kind: Any) -> str:
    if type(kind) is not int:  # not shown: it may be long, or nested too deeply for `repr`
        return f"an envelope's kind must be an integer, got a {type(kind).__name__}"
    expected = FIELD_TYPES.get(kind)
    if expected is None:
        return f"unknown envelope kind {kind}"
    if len(envelope) != len(expected) + 1:
        return f"envelope kind {kind}: {len(envelope) - 1} fields, not {len(expected)}"
    fields = zip(envelope[1:], expected, strict=True)
    wrong = [
        f"a {type(value).__name__} where a {expected.__name__} belongs"
        for value, expected in fields
        if expected is not object and type(value) is not expected
    ]
    return f"envelope kind {kind}: {', '.join(wrong)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRef:
    """Address of one incarnation of a named actor: a plain value, to be stored, compared and sent.
    Every call carries `incarnation`, so a message meant for an actor that has since been restarted
    is refused, never delivered to its successor."""

    name: str  # unique within the node
    incarnation: int  # how many times the actor has been started on this node, from 1
    node_id: str  # the host the actor lives on
    ipc_endpoint: str  # `ipc://...`, reachable on the same node
    tcp_endpoint: str = ""  # `tcp://...` under CURVE, or "" if the job has no tcp

    def endpoint_from(self, node_id: str) -> str:
        """The endpoint that a caller on `node_id` uses: ipc on the same node, else tcp."""
        return self.ipc_endpoint if node_id == self.node_id else self.tcp_endpoint

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}@{self.node_id}"
