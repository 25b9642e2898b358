"""The wire to one incarnation of an engine: requests out in batches, token deltas in.

    Dispatcher --send--> outgoing --submit()--> engine
        ^------------------ deltas() -------------|

Pure transport: the dispatcher decides what is in flight and what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine
from typing import Any, Final

from umbra.runtime.engine_api.delta_batch import DeltaBatch
from umbra.runtime.errors import (
    ConnectionLost,
    DeadlineExceeded,
    EngineError,
    RemoteError,
    RequestRefused,
    UmbraError,
    first_leaf,
)
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)

# Requests in one submit call. More delays the first of them and makes the connection keep a buffer
# of that size; fewer costs a round trip each.
_MAX_SUBMIT: Final = 64
# Batches that an engine may send ahead: at one per tick, most of a second of a busy manager.
_DELTA_CREDITS: Final = 16
# Longest wait for a state report of an engine that refused requests although it was reported as
# serving: its report of a pause is on the way. Shorter repeats the refusal; longer leaves the
# engine idle if no report comes.
_REFUSAL_PAUSE_S: Final = 0.2


class EngineLink:
    """Carries turns of the dispatcher to one engine; the one consumer of its `deltas` stream. The
    link ends if a serving engine that has work is silent for `delta_timeout_s`. With `must_greet`,
    the engine gets no work before it has sent something, because it was lost before."""

    def __init__(
        self,
        engine: EngineId,
        handle: Handle,
        dispatcher: Dispatcher,
        *,
        delta_timeout_s: float,
        submit_timeout_s: float,
        must_greet: bool = False,
    ) -> None:
        self.engine = engine
        self._handle = handle
        self._dispatcher = dispatcher
        self._delta_timeout_s = delta_timeout_s
        self._submit_timeout_s = submit_timeout_s
        self._outgoing: dict[int, dict[str, Any]] = {}  # bounded by the router's max_inflight
        self._withdrawn: list[int] = []
        self._pending = asyncio.Event()
        self._attached = asyncio.Event()  # the engine's stream has begun to send
        self._reported = asyncio.Event()  # a state was reported since the last submit began
        self._silence_timeout: asyncio.Timeout | None = None
        self._serving = False
        self._is_trusted = not must_greet

    def send(self, request: dict[str, Any]) -> None:
        was_idle = self._dispatcher.num_inflight(self.engine) <= 1
        self._outgoing[request["id"]] = request
        self._pending.set()
        if was_idle:
            self._reset_silence_timeout()

    def withdraw(self, request_ids: list[int]) -> None:
        self._withdrawn += [rid for rid in request_ids if self._outgoing.pop(rid, None) is None]
        self._pending.set()

    def set_serving(self, serving: bool) -> None:
        """An engine that does not serve may stay silent."""
        self._serving = serving
        self._reported.set()
        self._dispatcher.set_serving(self.engine, serving and self._is_trusted)
        self._reset_silence_timeout()

    async def run(self) -> None:
        """Runs while the engine can be reached; raises UmbraError with the reason when it ends."""
        # Neither part raises. Before Python 3.13 a TaskGroup whose child fails while it is being
        # cancelled forgets the cancellation, and one whose child fails leaves one pending.
        async with asyncio.TaskGroup() as tasks:
            parts = [
                tasks.create_task(_error_of(self._receive())),
                tasks.create_task(_error_of(self._submit())),
            ]
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                part.cancel()
        raise done.pop().result()

    async def _receive(self) -> None:
        try:
            async with asyncio.timeout(None) as self._silence_timeout:
                await self._receive_deltas()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.engine} holds {self._dispatcher.num_inflight(self.engine)} requests and "
                f"has sent nothing for {self._delta_timeout_s:.3g} s"
            ) from None
        finally:
            self._silence_timeout = None

    async def _receive_deltas(self) -> None:
        self._reset_silence_timeout()
        # No deadline per item: an idle engine is silent. `_silence_timeout` watches the busy one.
        stream = self._handle.stream("deltas", timeout_s=None, credits=_DELTA_CREDITS)
        async with stream as batches:
            async for item in batches:
                self._attached.set()
                self._dispatcher.on_batch(self.engine, DeltaBatch.from_wire(item))
                self._reset_silence_timeout()
                if not self._is_trusted:
                    self._is_trusted = True
                    self.set_serving(self._serving)
        raise ConnectionLost(f"{self.engine} ended its stream of deltas")

    def _reset_silence_timeout(self) -> None:
        if self._silence_timeout is None or self._silence_timeout.expired():
            return
        busy = self._serving and self._dispatcher.num_inflight(self.engine) > 0
        now = asyncio.get_running_loop().time()
        self._silence_timeout.reschedule(now + self._delta_timeout_s if busy else None)

    async def _submit(self) -> None:
        # The engine's first batch shows that the stream is this link's. An engine may not know yet
        # that an earlier manager died, and drops that manager's requests with its stream.
        await self._attached.wait()
        while True:
            await self._pending.wait()
            self._pending.clear()
            while self._withdrawn or self._outgoing:
                withdrawn, self._withdrawn = self._withdrawn, []
                if withdrawn:
                    await self._call("abort", withdrawn)
                first = list(itertools.islice(self._outgoing, _MAX_SUBMIT))
                requests = [self._outgoing.pop(request_id) for request_id in first]
                if requests:
                    await self._submit_batch(requests)

    async def _submit_batch(self, requests: list[dict[str, Any]]) -> None:
        self._reported.clear()
        try:
            await self._call("submit", requests)
        except RemoteError as error:
            if len(requests) > 1:  # single submits find out which one spoiled the batch
                for request in requests:
                    await self._submit_batch([request])
                return
            is_refusal = error.remote_type == "builtins.ValueError"
            reason = error.remote_message if is_refusal else str(error)
            refusal = RequestRefused(f"{self.engine} refused a request: {reason}")
            self._dispatcher.refuse(self.engine, requests[0]["id"], refusal)
        except EngineError as error:
            logger.warning("%s takes no requests now: %s", self.engine, error)
            self._dispatcher.hand_back(self.engine, [request["id"] for request in requests])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REFUSAL_PAUSE_S):
                    await self._reported.wait()
            self.set_serving(self._serving)

    async def _call(self, method: str, argument: object) -> None:
        await self._handle.call(method, argument, timeout_s=self._submit_timeout_s)


async def _error_of(work: Coroutine[Any, Any, None]) -> UmbraError:
    """Runs work that ends only by an error, and returns that error."""
    try:
        await work
    except UmbraError as error:
        return error
    except BaseExceptionGroup as group:
        cause = first_leaf(group)
        if isinstance(cause, UmbraError):
            return cause
        raise
    return ConnectionLost("the link ended")
