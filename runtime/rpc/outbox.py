from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from umbra.runtime.rpc.wire import Encoder, Frame

# A batch this large goes out at once: waiting longer saves nothing and delays its first call.
_FLUSH_NBYTES: Final = 64 * 1024


class Outbox:
    """Encodes envelopes for one peer and passes them to `send` in order.

    The first envelope of a loop iteration leaves at once, for latency; those behind it share one
    message at the iteration's end, for throughput. Many peers of one loop may share the encoder,
    whose buffer is as large as the largest value.
    """

    def __init__(self, send: Callable[[Sequence[Frame]], None], encoder: Encoder) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._encoder = encoder
        self._headers: list[bytes] = []
        self._nbytes = 0
        self._flush_scheduled = False

    def put(self, envelope: tuple[Any, ...]) -> None:
        """Queues one envelope. Raises TypeError, ValueError or OverflowError for a value
        without wire form."""
        header, frames = self._encoder.encode(envelope)
        if frames or len(header) >= _FLUSH_NBYTES:
            # Sent alone, so that a batch stays far below the receiver's limit for one header.
            self.flush()
            self._send([header, *frames])
            return
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._end_iteration)
            self._send([header])
            return
        self._headers.append(header)
        self._nbytes += len(header)
        if self._nbytes >= _FLUSH_NBYTES:
            self.flush()

    def _end_iteration(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        if self._headers:
            headers, self._headers, self._nbytes = self._headers, [], 0
            self._send([headers[0] if len(headers) == 1 else b"".join(headers)])
