"""Calls between real processes: each has exactly one outcome, whatever happens to either end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpc_process import ActorProcess, connected, make_ref, run, short_folder, until

from umbra.runtime.errors import (
    ActorNotFound,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    MailboxClosed,
    ProtocolError,
    RemoteError,
)
from umbra.runtime.rpc.client import Client, Handle
from umbra.runtime.rpc.messages import CALL, CANCEL, CREDIT, HELLO, RESULT
from umbra.runtime.rpc.ref import ActorRef
from umbra.runtime.rpc.server import ActorServer

pytestmark = pytest.mark.process

AT_ONCE_S = 1.5
"""Far below every deadline used here, far above what a busy machine needs."""


@pytest.fixture(scope="module")
def shared() -> Iterator[ActorProcess]:
    """One actor for the tests that leave it as it was but for its counts."""
    with short_folder() as folder, ActorProcess(Path(folder)) as actor:
        yield actor


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield Path(path)


@pytest.fixture
def actor(folder: Path) -> Iterator[ActorProcess]:
    """One actor for a test that breaks it, or counts."""
    with ActorProcess(folder) as started:
        yield started


async def count(probe: Handle, what: str) -> int:
    counts: dict[str, int] = await probe.call("counts", timeout_s=5.0)
    return counts.get(what, 0)


async def read_all(
    probe: Handle, method: str, *args: object, timeout_s: float = 20.0, credits: int = 16
) -> list[Any]:
    async with probe.stream(method, *args, timeout_s=timeout_s, credits=credits) as items:
        return [item async for item in items]


# -- results -----------------------------------------------------------------------------


def test_values_come_back_from_every_kind_of_method(shared: ActorProcess) -> None:
    value = {"text": "é", "list": [1, -2.5, None, True], "bytes": b"\x00\xff", "ref": shared.ref}

    async def main() -> None:
        async with connected(shared.ref) as probe:
            assert await probe.call("echo", value, timeout_s=5.0) == value
            assert await probe.call("echo", 1, twice=True, timeout_s=5.0) == [1, 1]
            assert await probe.call("echo_async", value, timeout_s=5.0) == value
            assert await probe.call("pid", timeout_s=5.0) == shared.pid

    run(main())


@pytest.mark.slow
def test_ten_thousand_pipelined_calls_are_all_answered_with_their_own_value(
    shared: ActorProcess,
) -> None:
    num_calls = 10_000

    async def main() -> list[int]:
        async with connected(shared.ref) as probe:
            return await asyncio.gather(
                *[
                    probe.call("echo_async" if idx % 3 else "echo", idx, timeout_s=40.0)
                    for idx in range(num_calls)
                ]
            )

    assert run(main()) == list(range(num_calls))


@pytest.mark.slow
def test_calls_of_one_caller_run_in_the_order_they_were_made(actor: ActorProcess) -> None:
    async def main() -> list[int]:
        async with connected(actor.ref) as probe:
            return await asyncio.gather(
                *[probe.call("append", idx, timeout_s=20.0) for idx in range(2000)]
            )

    assert run(main()) == list(range(2000))


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "|b1", "<i8", ">f8"])
def test_large_arrays_travel_bit_for_bit_without_a_copy(shared: ActorProcess, dtype: str) -> None:
    array = np.random.default_rng(3).integers(0, 100, (1000, 1000)).astype(dtype)

    async def main() -> None:
        async with connected(shared.ref) as probe:
            seen = await probe.call("digest", array, timeout_s=20.0)
            back = await probe.call("echo", array, timeout_s=20.0)
        assert seen["sha"] == hashlib.sha256(array.tobytes()).hexdigest()
        assert (seen["dtype"], seen["shape"]) == (dtype, [1000, 1000])
        assert (seen["is_view"], seen["is_writeable"]) == (True, False)
        assert back.tobytes() == array.tobytes()
        assert not back.flags.owndata

    run(main())


def test_results_larger_than_a_socket_buffer_arrive_whole(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            arrays = await asyncio.gather(
                *[probe.call("ramp", 2_000_000 + idx, timeout_s=30.0) for idx in range(4)]
            )
        for idx, array in enumerate(arrays):
            assert np.array_equal(array, np.arange(2_000_000 + idx))

    run(main())


# -- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fail", "fail_async"])
def test_a_remote_error_has_type_message_and_traceback(shared: ActorProcess, method: str) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call(method, "no such colour", timeout_s=5.0)

    with pytest.raises(RemoteError) as raised:
        run(main())

    error = raised.value
    assert (error.remote_type, error.remote_message) == ("builtins.ValueError", "no such colour")
    assert "rpc_probe.py" in error.remote_traceback
    assert f"in {method}" in error.remote_traceback


def test_an_error_of_umbra_is_raised_as_itself_with_its_remote_cause(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call("fail_with_config_error", timeout_s=5.0)

    with pytest.raises(ConfigError, match="allowed are red and green") as raised:
        run(main())

    assert isinstance(raised.value.__cause__, RemoteError)


@pytest.mark.parametrize("method", ["fail_about_a_file", "fail_about_a_file_async"])
def test_error_texts_without_a_wire_form_do_not_kill_the_actor(
    actor: ActorProcess, method: str
) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            with pytest.raises(RemoteError, match=r"caf\\udce9\.jsonl is missing"):
                await probe.call(method, b"caf\xe9.jsonl", timeout_s=5.0)
            assert await probe.call("echo", "alive", timeout_s=5.0) == "alive"

    run(main())


@pytest.mark.parametrize("method", ["fail_unprintably", "fail_unprintably_async"])
def test_an_error_that_cannot_be_printed_does_not_kill_the_actor(
    actor: ActorProcess, method: str
) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            with pytest.raises(RemoteError, match="Unprintable"):
                await probe.call(method, timeout_s=5.0)
            assert await probe.call("echo", "alive", timeout_s=5.0) == "alive"

    run(main())


@pytest.mark.parametrize("method", ["cancel_itself", "cancel_itself_async"])
def test_a_callee_that_is_cancelled_from_within_still_answers(
    actor: ActorProcess, method: str
) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            with pytest.raises(RemoteError, match="CancelledError"):
                await probe.call(method, timeout_s=5.0)
            assert await probe.call("echo", "alive", timeout_s=5.0) == "alive"

    run(main())


UNSENDABLE = [
    "set", "huge int", "int keys", "nested int keys", "surrogate", "memoryview with gaps",
    "objects", "long bytes",
]  # fmt: skip


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_a_result_without_a_wire_form_is_an_error_at_once(shared: ActorProcess, kind: str) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            with pytest.raises((RemoteError, ProtocolError)):
                await probe.call("unsendable", kind, timeout_s=30.0)
            assert await probe.call("echo", "alive", timeout_s=5.0) == "alive"

    before = time.monotonic()
    run(main())
    assert time.monotonic() - before < 10.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "argument",
    [{1, 2}, 1 << 70, {1: "one"}, {"a": {2: 3}}, "\udc80", bytes(33 << 20), ["x" * (9 << 20)] * 8],
    ids=[
        "set",
        "huge int",
        "int keys",
        "nested int keys",
        "surrogate",
        "long bytes",
        "long header",
    ],
)
def test_an_argument_without_a_wire_form_is_an_error_at_once(
    shared: ActorProcess, argument: object
) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            with pytest.raises((TypeError, ValueError, OverflowError, ProtocolError)):
                await probe.call("echo", argument, timeout_s=30.0)
            assert await probe.call("echo", "alive", timeout_s=5.0) == "alive"

    before = time.monotonic()
    run(main())
    assert time.monotonic() - before < 10.0


@pytest.mark.parametrize("method", ["no_such", "_count", "__init__", "run", "_secret", "__dict__"])
def test_only_public_methods_can_be_called(shared: ActorProcess, method: str) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call(method, timeout_s=5.0)

    with pytest.raises(ActorNotFound, match=r"no method.*there are: .*echo"):
        run(main())


def test_wrong_arguments_are_the_callers_error(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call("echo", timeout_s=5.0)

    with pytest.raises(RemoteError, match="missing 1 required positional argument"):
        run(main())


# -- deadlines and cancellation ----------------------------------------------------------


def test_the_deadline_ends_the_call_and_cancels_the_callee(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            before = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"probe#1@node\.sleep did not answer"):
                await probe.call("sleep", 3600, timeout_s=0.3)
            assert 0.25 < time.monotonic() - before < 0.3 + AT_ONCE_S

            async def was_cancelled() -> bool:
                return await count(probe, "sleep cancelled") == 1

            await until(was_cancelled, AT_ONCE_S)

    run(main())


def test_a_missed_deadline_is_never_reported_as_the_callees_error(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            outcomes = await asyncio.gather(
                *[probe.call("sleep", 3600, timeout_s=0.1 + idx * 0.00037) for idx in range(200)],
                return_exceptions=True,
            )
        assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}

    run(main())


def test_a_call_with_no_time_left_is_not_sent(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            for timeout_s in (0.0, -1.0):
                with pytest.raises(DeadlineExceeded):
                    await probe.call("append", 1, timeout_s=timeout_s)
            for timeout_s in (float("inf"), float("nan")):
                with pytest.raises(ValueError, match="timeout_s"):
                    await probe.call("append", 1, timeout_s=timeout_s)
            assert await count(probe, "appended") == 0

    run(main())


def test_cancelling_the_caller_cancels_the_callee(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe, asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(probe.call("sleep", 3600, timeout_s=50.0))

            async def has_begun() -> bool:
                return await count(probe, "began to sleep") == 1

            async def was_cancelled() -> bool:
                return await count(probe, "sleep cancelled") == 1

            await until(has_begun)
            calling.cancel()
            await until(was_cancelled, AT_ONCE_S)

    run(main())


def test_a_call_cancelled_before_it_began_leaves_no_coroutine_behind(actor: ActorProcess) -> None:
    with RawSocket(actor.ref) as socket:
        call = msgpack.packb([CALL, 7, 1, "sleep", [3600], {}, 5000, 0])
        socket.send(call + msgpack.packb([CANCEL, 7]))
        socket.send(msgpack.packb([CALL, 8, 1, "echo", ["after"], {}, 5000, 0]))
        assert receive_result(socket, 8) == "after"

    actor.end()
    assert "never awaited" not in actor.log()


@pytest.mark.slow
def test_a_callee_that_cleans_up_slowly_may_finish(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            with pytest.raises(DeadlineExceeded):
                await probe.call("cling", 2.5, timeout_s=0.1)

            async def cleaned_up() -> bool:
                return await count(probe, "cleaned up") == 1

            await until(cleaned_up)

    run(main())


@pytest.mark.slow
def test_a_stopped_callers_call_ends_at_its_deadline(actor: ActorProcess) -> None:
    with RawSocket(actor.ref) as socket:
        socket.send(msgpack.packb([CALL, 1, 1, "sleep", [3600], {}, 200, 0]))

        async def main() -> None:
            async with connected(actor.ref) as probe:

                async def was_cancelled() -> bool:
                    return await count(probe, "sleep cancelled") == 1

                await until(was_cancelled, 5.0)

        run(main())


# -- a peer goes away --------------------------------------------------------------------


def test_a_killed_peer_is_lost_at_once(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe, asyncio.TaskGroup() as tasks:

            async def call() -> None:
                with pytest.raises(ConnectionLost, match="probe#1@node"):
                    await probe.call("sleep", 3600, timeout_s=50.0)

            async def listen() -> None:
                with pytest.raises(ConnectionLost):
                    await read_all(probe, "silence", timeout_s=50.0)

            for _ in range(20):
                tasks.create_task(call())
            tasks.create_task(listen())

            async def all_running() -> bool:
                return await count(probe, "began to sleep") == 20

            await until(all_running)
            actor.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
        assert time.monotonic() - killed_at < AT_ONCE_S

    run(main())


@pytest.mark.slow
def test_an_answer_given_before_the_end_is_not_lost(folder: Path) -> None:
    async def main(actor: ActorProcess) -> None:
        async with connected(actor.ref) as probe:
            await probe.call("pid", timeout_s=5.0)
            async with asyncio.TaskGroup() as tasks:
                answer = tasks.create_task(probe.call("answer_and_exit", 42, timeout_s=20.0))
                await asyncio.sleep(0)
                # While this loop does not look, the answer and the end of the peer both arrive.
                actor.wait()
            assert answer.result() == 42

    for incarnation in range(1, 4):
        with ActorProcess(folder, incarnation) as actor:
            run(main(actor))


def test_a_stream_that_ended_is_whole_although_its_peer_is_gone(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            async with probe.stream("numbers", 10, timeout_s=20.0, credits=16) as items:
                received = [await anext(items)]

                async def ended() -> bool:
                    return await count(probe, "stream closed") == 1

                await until(ended)
                actor.send_signal(signal.SIGKILL)
                with pytest.raises(ConnectionLost):
                    await probe.call("sleep", 3600, timeout_s=20.0)
                received += [item async for item in items]
            assert received == list(range(10))

    run(main())


def test_an_actor_that_is_gone_is_lost_at_once_for_new_callers_too(actor: ActorProcess) -> None:
    actor.send_signal(signal.SIGKILL)
    actor.wait()

    async def main() -> None:
        async with connected(actor.ref) as probe:
            before = time.monotonic()
            with pytest.raises(ConnectionLost, match="nothing listens"):
                await probe.call("echo", 1, timeout_s=30.0)
            assert time.monotonic() - before < AT_ONCE_S

    run(main())


@pytest.mark.slow
def test_a_vanished_callers_call_is_cancelled(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            async with connected(actor.ref) as other, asyncio.TaskGroup() as tasks:

                async def call() -> None:
                    with pytest.raises(MailboxClosed):
                        await other.call("sleep", 3600, timeout_s=50.0)

                tasks.create_task(call())

                async def has_begun() -> bool:
                    return await count(probe, "began to sleep") == 1

                await until(has_begun)
                other._client.close()  # pyright: ignore[reportPrivateUsage]

            async def was_cancelled() -> bool:
                return await count(probe, "sleep cancelled") == 1

            await until(was_cancelled, 5.0)

    run(main())


def test_a_closed_client_refuses_calls(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call("pid", timeout_s=5.0)
        with pytest.raises(MailboxClosed):
            await probe.call("pid", timeout_s=5.0)

    run(main())


def test_a_call_for_an_earlier_incarnation_is_refused(folder: Path) -> None:
    with ActorProcess(folder, incarnation=2) as actor:
        stale = ActorRef(
            name="probe", incarnation=1, node_id="node", ipc_endpoint=actor.ref.ipc_endpoint
        )

        async def main() -> None:
            async with connected(stale) as probe:
                with pytest.raises(ActorNotFound, match=r"incarnation 2 is here.* was for 1"):
                    await probe.call("append", 1, timeout_s=5.0)
            async with connected(actor.ref) as probe:
                assert await count(probe, "appended") == 0

        run(main())


class Restarter:
    """What a supervisor does for its clients: names the live incarnation, late."""

    def __init__(self, folder: Path, num_stale_answers: int) -> None:
        self._folder = folder
        self._num_stale_left = num_stale_answers
        self.current = ActorProcess(folder, 1)

    async def resolve(self, lost: ActorRef, timeout_s: float) -> ActorRef:
        del lost, timeout_s
        if self._num_stale_left:
            self._num_stale_left -= 1
            return make_ref(self._folder, 1)
        if self.current.ref.incarnation == 1:
            self.current.wait()
            self.current = ActorProcess(self._folder, 2).__enter__()
        return self.current.ref


@pytest.mark.slow
@pytest.mark.parametrize("num_stale_answers", [0, 2])
def test_an_idempotent_call_is_retried_on_the_next_incarnation(
    folder: Path, num_stale_answers: int
) -> None:
    restarter = Restarter(folder, num_stale_answers)
    with restarter.current:

        async def main() -> None:
            async with Client("node") as client:
                probe = client.handle(restarter.current.ref, restarter.resolve)
                marker = str(folder / "died")
                assert await probe.call("die_the_first_time", marker, timeout_s=30.0) == "lived"
                assert probe.ref.incarnation == 2

        try:
            run(main())
        finally:
            restarter.current.end()


def test_a_call_that_is_not_idempotent_is_not_retried_but_the_next_one_finds_the_actor(
    folder: Path,
) -> None:
    restarter = Restarter(folder, num_stale_answers=0)
    with restarter.current:

        async def main() -> None:
            async with Client("node") as client:
                probe = client.handle(restarter.current.ref, restarter.resolve)
                marker = str(folder / "died")
                with pytest.raises(ConnectionLost):
                    await probe.call("die_the_first_time_for_good", marker, timeout_s=30.0)
                assert await probe.call("echo", "again", timeout_s=30.0) == "again"
                assert probe.ref.incarnation == 2

        try:
            run(main())
        finally:
            restarter.current.end()


def test_a_callee_that_lost_a_peer_of_its_own_is_not_called_again(actor: ActorProcess) -> None:
    async def resolve(lost: ActorRef, timeout_s: float) -> ActorRef:
        del lost, timeout_s
        return actor.ref

    async def main() -> None:
        async with Client("node") as client:
            probe = client.handle(actor.ref, resolve)
            with pytest.raises(ConnectionLost, match="third party"):
                await probe.call("lose_a_peer_of_its_own", timeout_s=3.0)
            assert await count(probe, "lost a peer") == 1

    run(main())


# -- a peer that is not there yet --------------------------------------------------------


class Recorder:
    """An actor served inside the test's own process, to choose the moment it starts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, text: str) -> str:
        self.seen.append(text)
        return text


def test_a_call_that_arrives_before_the_server_runs_is_answered(folder: Path) -> None:
    async def main() -> None:
        server = ActorServer(Recorder(), 1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ref = make_ref(folder)
        server.bind(context.socket(zmq.ROUTER), ref.ipc_endpoint)
        async with connected(ref) as handle, asyncio.TaskGroup() as tasks:
            early = tasks.create_task(handle.call("note", "early", timeout_s=10.0))
            await asyncio.sleep(0.2)
            serving = tasks.create_task(server.run())
            assert await early == "early"
            serving.cancel()
        context.term()

    run(main())


def test_a_call_given_up_before_its_peer_listens_never_runs(folder: Path) -> None:
    recorder = Recorder()

    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ref = make_ref(folder)
        async with Client("node") as client, asyncio.TaskGroup() as tasks:
            handle = client.handle(ref, awaits_start=True)
            with pytest.raises(DeadlineExceeded):
                await handle.call("note", "too late", timeout_s=0.2)
            server = ActorServer(recorder, 1)
            server.bind(context.socket(zmq.ROUTER), ref.ipc_endpoint)
            serving = tasks.create_task(server.run())
            assert await handle.call("note", "in time", timeout_s=10.0) == "in time"
            serving.cancel()
        context.term()

    run(main())
    assert recorder.seen == ["in time"]


# -- streams -----------------------------------------------------------------------------


def test_a_stream_gives_every_item_in_order(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            for credits in (1, 2, 16, 5000):
                async with probe.stream("numbers", 1000, timeout_s=20.0, credits=credits) as items:
                    assert [item async for item in items] == list(range(1000))

    run(main())


def test_streams_carry_large_arrays(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            received = await read_all(probe, "arrays", 20, 100_000, credits=2)
        assert [int(item[0]) for item in received] == list(range(20))
        assert all(bool((item == item[0]).all()) and len(item) == 100_000 for item in received)

    run(main())


@pytest.mark.slow
def test_a_slow_reader_slows_the_writer(actor: ActorProcess) -> None:
    credits = 8

    async def main() -> None:
        async with (
            connected(actor.ref) as probe,
            probe.stream("numbers", 10**9, timeout_s=20.0, credits=credits) as items,
        ):
            num_taken = 0
            for num_more in (1, 20):
                for _ in range(num_more):
                    await anext(items)
                    num_taken += 1
                # Time enough for thousands of items, were they not held back.
                await asyncio.sleep(0.2)
                assert 0 <= await count(probe, "yielded") - num_taken <= credits

    run(main())


def test_closing_a_stream_cancels_the_generator(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            async with probe.stream("silence", timeout_s=20.0) as items:
                assert await anext(items) == 0
            async with probe.stream("numbers", 10**9, timeout_s=20.0, credits=4) as items:
                async for item in items:
                    if item == 10:
                        break

            async def both_closed() -> bool:
                return await count(probe, "stream closed") == 2

            await until(both_closed, AT_ONCE_S)

    run(main())


def test_a_stream_that_fails_gives_its_items_first(shared: ActorProcess) -> None:
    received: list[int] = []

    async def main() -> None:
        async with (
            connected(shared.ref) as probe,
            probe.stream("numbers", 10, fail_at=5, timeout_s=20.0) as items,
        ):
            async for item in items:
                received.append(item)

    with pytest.raises(RemoteError, match="no number 5"):
        run(main())
    assert received == [0, 1, 2, 3, 4]


def test_a_silent_stream_ends_at_its_deadline_and_its_generator_too(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            with pytest.raises(DeadlineExceeded, match=r"no item for 0\.3 s"):
                await read_all(probe, "silence", timeout_s=0.3)

            async def closed() -> bool:
                return await count(probe, "stream closed") == 1

            await until(closed, AT_ONCE_S)

    run(main())


def test_a_generator_whose_clean_up_fails_does_not_kill_the_actor(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            async with probe.stream("clean_up_badly", timeout_s=20.0, credits=2) as items:
                assert await anext(items) == 0
            await asyncio.sleep(0.2)
            assert await probe.call("echo", "alive", timeout_s=5.0) == "alive"

    run(main())
    assert "the clean-up failed" in actor.log()


def test_a_stream_called_as_a_method_and_the_reverse_fail_at_once(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            before = time.monotonic()
            with pytest.raises(RemoteError, match="stream"):
                await probe.call("numbers", 3, timeout_s=20.0)
            with pytest.raises(ProtocolError, match="not a generator"):
                await read_all(probe, "echo", 1)
            with pytest.raises(ValueError, match="credits"):
                await read_all(probe, "numbers", 3, credits=0)
            assert time.monotonic() - before < AT_ONCE_S

    run(main())


# -- malformed messages ------------------------------------------------------------------


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


ECHO = msgpack.packb([CALL, 99, 1, "echo", ["alive"], {}, 5000, 0])


def echo_of_extension(code: int, fields: tuple[object, ...]) -> list[bytes]:
    extension = msgpack.ExtType(code, msgpack.packb(fields))
    return [msgpack.packb([CALL, 1, 1, "echo", [extension], {}, 5000, 0])]


MALFORMED: list[list[bytes]] = [
    [b""],
    [b"\xc1"],
    [b"\x91" * 5000],
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


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.binary(max_size=100), min_size=1, max_size=3))
def test_random_garbage_is_dropped_and_the_actor_lives(
    shared: ActorProcess, frames: list[bytes]
) -> None:
    with RawSocket(shared.ref) as socket:
        socket.send_multipart(frames)  # pyright: ignore[reportUnknownMemberType]
        socket.send(ECHO)
        assert receive_result(socket, 99) == "alive"


def test_a_good_call_behind_a_bad_one_in_another_message_is_answered(shared: ActorProcess) -> None:
    with RawSocket(shared.ref) as socket:
        socket.send(ECHO[:-1])
        socket.send(ECHO)
        assert receive_result(socket, 99) == "alive"


# -- heartbeats --------------------------------------------------------------------------


@pytest.mark.slow
def test_heartbeats_tell_idle_blocked_and_stopped_apart(actor: ActorProcess) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(actor.heartbeat_endpoint)

        async def beat(timeout_s: float) -> float:
            """Age of the loop's last tick."""
            async with asyncio.timeout(timeout_s):
                await socket.send(b"")
                incarnation, age_s, _stalled_s = msgpack.unpackb(await socket.recv())
            assert incarnation == 1
            return float(age_s)

        try:
            async with connected(actor.ref) as probe:
                await probe.call("pid", timeout_s=5.0)
                assert await beat(5.0) < 1.0

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(probe.call("block", 2.0, timeout_s=20.0))
                    await asyncio.sleep(1.5)
                    assert await beat(5.0) > 1.0

                actor.stop()
                with pytest.raises(TimeoutError):
                    await beat(1.0)
                actor.send_signal(signal.SIGCONT)
                async with asyncio.timeout(5.0):
                    await socket.recv()
                assert await probe.call("echo", "back", timeout_s=5.0) == "back"
        finally:
            socket.close()
            context.term()

    run(main())


# -- ends --------------------------------------------------------------------------------


def test_sigterm_ends_an_actor_with_running_calls_cleanly(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe, asyncio.TaskGroup() as tasks:

            async def call() -> None:
                with pytest.raises(ConnectionLost):
                    await probe.call("sleep", 3600, timeout_s=50.0)

            tasks.create_task(call())

            async def has_begun() -> bool:
                return await count(probe, "began to sleep") == 1

            await until(has_begun)
            actor.send_signal(signal.SIGTERM)

    run(main())
    assert actor.wait() == 0
    assert "Traceback" not in actor.log()


def test_clients_leave_no_descriptor_behind(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call("pid", timeout_s=5.0)

    run(main())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run(main())

    assert len(os.listdir("/proc/self/fd")) == before
