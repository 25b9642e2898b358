"""How a command waits for the supervisor of a job."""

from __future__ import annotations

import signal

import pytest

from umbra.runtime.supervisor.live_job import run_interruptibly


def test_ctrl_c_is_not_lost_where_a_call_does_not_wait() -> None:
    async def never_waits() -> str:
        signal.raise_signal(signal.SIGINT)
        return "nothing runs"

    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(never_waits())
    finally:
        signal.signal(signal.SIGINT, former)
