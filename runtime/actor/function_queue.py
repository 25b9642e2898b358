from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class FunctionQueue:
    """Runs functions one after the other, on the thread that calls `serve`.

    Attributes:
        thread_id: the thread's `threading.get_ident`; 0 before `serve`.
        has_stopped: set once `serve` has returned.
    """

    def __init__(self) -> None:
        self.thread_id = 0
        self.has_stopped = threading.Event()
        self._functions = queue.SimpleQueue[Callable[[], object] | None]()

    def serve(self) -> None:
        self.thread_id = threading.get_ident()
        while True:
            try:
                if (function := self._functions.get()) is None:
                    break
                function()
            except BaseException:
                logger.exception("raised on a thread that runs user code, between two calls")
        self.has_stopped.set()

    def serve_on_a_thread(self, name: str) -> None:
        threading.Thread(target=self.serve, name=name, daemon=True).start()

    def stop(self) -> None:
        """Makes `serve` return after the functions queued so far. Called on any thread."""
        self._functions.put(None)

    def put(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Returns the result's future. A function whose future is cancelled before its
        turn is skipped."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                value = function()
            except StopIteration as error:  # a future cannot carry it
                other = RuntimeError(f"raised StopIteration: {error}")
                result.set_exception(other.with_traceback(error.__traceback__))
            except BaseException as error:  # noqa: BLE001  for the caller, even a SystemExit
                result.set_exception(error)
            else:
                result.set_result(value)

        self._functions.put(run)
        return result
