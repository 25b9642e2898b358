"""Reads any message as its receiver would, and fails if that fails in an undocumented way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from fuzz_target import read_sync_call
from recorded_traffic import Message

from umbra.runtime.actor.heartbeat import Beat
from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.rpc.wire import (
    CALL,
    CANCEL,
    CREDIT,
    HELLO,
    ITEM,
    RESULT,
    Decoder,
    check_envelope,
)
from umbra.runtime.weights.exports.exported_image import ExportedImage
from umbra.runtime.weights.rank_exports import RankExports
from umbra.runtime.weights.sync_messages import SyncBegin, SyncEnd, SyncProgressed, decode_answer

_NOTHING_TO_OPEN: Final[Any] = SimpleNamespace(device_uuid=bytes)
# There is no GPU, and nothing is read.
_FROM_CALLERS: Final = frozenset({CALL, CANCEL, CREDIT, HELLO})
_BEGIN: Final = SyncBegin(
    pool="policy",
    version=1,
    rank=0,
    world_size=1,
    manifest=None,
    offers={},
    node_id="",
    deadline=0.0,
)
_END: Final = SyncEnd(sync_id="policy-1", rank=0, deadline=0.0)
_PROGRESSED: Final = SyncProgressed(sync_id="policy-1", rank=0, num_filled=0, deadline=0.0)
_ANSWERS: Final[Sequence[Callable[[Any], object]]] = (
    partial(decode_answer, _BEGIN),
    partial(decode_answer, _PROGRESSED),
    partial(decode_answer, _END),
    DeltaBatch.from_wire,
    Beat.decode,
)


class MessageReader:
    """The receiving end of calls, sync calls, their answers and token deltas, without a socket.

    Attributes:
        num_read: values that were found well-formed: weight metadata, heartbeats, token deltas.
    """

    def __init__(self) -> None:
        self._decoder = Decoder()
        self.num_read = 0

    def read(self, message: Message) -> bool:
        """Whether a server accepts the whole message; False if it must count it as malformed.

        Raises whatever but ProtocolError the code under test raises, and AssertionError if it
        accepts what no process of umbra could have sent.
        """
        is_good = True
        try:
            for raw in self._decoder.decode(message[0], message[1:]):
                envelope = check_envelope(raw)
                self._read_values(envelope)
                is_good &= envelope[0] in _FROM_CALLERS
        except ProtocolError:
            return False
        return is_good

    def _read_values(self, envelope: list[Any]) -> None:
        match envelope:
            case [kind, _, _, "sync", [argument, *_], *_] if kind == CALL:
                self._try(_read_sync_call, argument)
            case [kind, _, value] if kind in (RESULT, ITEM):
                for reader in _ANSWERS:
                    self._try(reader, value)
            case _:
                pass

    def _try(self, reader: Callable[[Any], object], raw: object) -> None:
        try:
            reader(raw)
        except ProtocolError:
            return
        self.num_read += 1


def _read_sync_call(raw: object) -> None:
    """As the supervisor does, and then as an engine does that gets the exports of all ranks."""
    call, manifest = read_sync_call(raw)
    offer = call.offers.get("cuda_ipc") if isinstance(call, SyncBegin) else None
    if manifest is None or not isinstance(offer, bytes):
        return
    exports = RankExports.from_wire(offer)
    try:
        image = ExportedImage(manifest, [exports.to_wire()], _NOTHING_TO_OPEN)
    except WeightSyncError:  # not the tensors of the manifest
        return
    for idx in range(len(manifest.entries)):
        image.regions(idx)
