"""An actor that gets malformed messages: it has the methods of recorded calls, and reads weight
metadata as the supervisor does."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import AsyncGenerator
from typing import Any, Final

import numpy as np

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_messages import SyncBegin, SyncCall, decode_call

_NUM_BATCHES: Final = 30
"""Of a stream, which malformed credits must not make endless."""


def read_sync_call(raw: object) -> tuple[SyncCall, Manifest | None]:
    """Raises ProtocolError, and AssertionError for values that `encode` could not have made."""
    call = decode_call(raw)
    assert math.isfinite(call.deadline), raw
    if isinstance(call, SyncBegin) and call.manifest is not None:
        return call, Manifest.from_wire(call.manifest)
    return call, None


class FuzzTarget:
    def __init__(self) -> None:
        self._unpickled: list[str] = []
        self._surprises: list[str] = []
        sys.addaudithook(self._on_audit_event)

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            self._unpickled.append(".".join(args))

    def unpickle(self, data: bytes) -> None:
        pickle.loads(data)

    def report(self) -> dict[str, Any]:
        """Classes that were unpickled, and errors of sync calls that are not documented."""
        return {"unpickled": self._unpickled[:10], "surprises": self._surprises[:10]}

    async def sync(self, raw: Any) -> object:
        try:
            _, manifest = read_sync_call(raw)
        except ProtocolError:
            raise
        except Exception as error:
            self._surprises.append(repr(error)[:1000])
            raise
        return None if manifest is None else manifest.to_wire()

    async def deltas(self) -> AsyncGenerator[Any, None]:
        for number in range(_NUM_BATCHES):
            yield {"tokens": np.full(100, number, np.int32)}

    # What the others do with their arguments is not tested here: they are sent back.

    def attach(self, *args: Any) -> Any:
        return args

    async def spawn(self, spec: Any) -> Any:
        return spec

    async def create_pool(self, spec: Any) -> Any:
        return spec

    async def resolve(self, *args: Any) -> Any:
        return args

    async def submit(self, requests: Any) -> Any:
        return requests

    def pool_states(self, name: Any) -> Any:
        return name

    def detach(self, rank: Any) -> Any:
        return rank

    def who(self) -> str:
        return "the target"
