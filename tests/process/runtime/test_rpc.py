"""Calls between real processes: values and errors come back as they were made."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time

import numpy as np
import pytest
from rpc_fixtures import *  # noqa: F403 - the fixtures
from rpc_process import ActorProcess, connected, on_uvloop, run

from umbra.runtime.errors import ActorNotFound, ConfigError, ProtocolError, RemoteError

pytestmark = pytest.mark.process


@on_uvloop
async def test_values_come_back_from_every_kind_of_method(shared: ActorProcess) -> None:
    value = {"text": "é", "list": [1, -2.5, None, True], "bytes": b"\x00\xff", "ref": shared.ref}

    async with connected(shared.ref) as probe:
        assert await probe.call("echo", value, timeout_s=30.0) == value
        assert await probe.call("echo", 1, twice=True, timeout_s=30.0) == [1, 1]
        assert await probe.call("echo_async", value, timeout_s=30.0) == value
        assert await probe.call("pid", timeout_s=30.0) == shared.pid


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
                *[probe.call("append", idx, timeout_s=60.0) for idx in range(2000)]
            )

    assert run(main()) == list(range(2000))


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "|b1", "<i8", ">f8"])
@on_uvloop
async def test_large_arrays_travel_bit_for_bit_without_a_copy(
    shared: ActorProcess, dtype: str
) -> None:
    array = np.random.default_rng(3).integers(0, 100, (1000, 1000)).astype(dtype)

    async with connected(shared.ref) as probe:
        seen = await probe.call("digest", array, timeout_s=60.0)
        back = await probe.call("echo", array, timeout_s=60.0)
    assert seen["sha"] == hashlib.sha256(array.tobytes()).hexdigest()
    assert (seen["dtype"], seen["shape"]) == (dtype, [1000, 1000])
    assert (seen["is_view"], seen["is_writeable"]) == (True, False)
    assert back.tobytes() == array.tobytes()
    assert not back.flags.owndata


@pytest.mark.parametrize("method", ["fail", "fail_async"])
def test_a_remote_error_has_type_message_and_traceback(shared: ActorProcess, method: str) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call(method, "no such colour", timeout_s=30.0)

    with pytest.raises(RemoteError) as raised:
        run(main())

    error = raised.value
    assert (error.remote_type, error.remote_message) == ("builtins.ValueError", "no such colour")
    assert "rpc_probe.py" in error.remote_traceback
    assert f"in {method}" in error.remote_traceback


def test_an_error_of_umbra_is_raised_as_itself_with_its_remote_cause(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call("fail_with_config_error", timeout_s=30.0)

    with pytest.raises(ConfigError, match="allowed are red and green") as raised:
        run(main())

    assert isinstance(raised.value.__cause__, RemoteError)


@pytest.mark.parametrize("method", ["fail_about_a_file", "fail_about_a_file_async"])
@on_uvloop
async def test_error_texts_without_a_wire_form_do_not_kill_the_actor(
    actor: ActorProcess, method: str
) -> None:
    async with connected(actor.ref) as probe:
        with pytest.raises(RemoteError, match=r"caf\\udce9\.jsonl is missing"):
            await probe.call(method, b"caf\xe9.jsonl", timeout_s=30.0)
        assert await probe.call("echo", "alive", timeout_s=30.0) == "alive"


@pytest.mark.parametrize("method", ["fail_unprintably", "fail_unprintably_async"])
@on_uvloop
async def test_an_error_that_cannot_be_printed_does_not_kill_the_actor(
    actor: ActorProcess, method: str
) -> None:
    async with connected(actor.ref) as probe:
        with pytest.raises(RemoteError, match="Unprintable"):
            await probe.call(method, timeout_s=30.0)
        assert await probe.call("echo", "alive", timeout_s=30.0) == "alive"


@pytest.mark.parametrize("method", ["cancel_itself", "cancel_itself_async"])
@on_uvloop
async def test_a_callee_that_is_cancelled_from_within_still_answers(
    actor: ActorProcess, method: str
) -> None:
    async with connected(actor.ref) as probe:
        with pytest.raises(RemoteError, match="CancelledError"):
            await probe.call(method, timeout_s=30.0)
        assert await probe.call("echo", "alive", timeout_s=30.0) == "alive"


@pytest.mark.parametrize("kind", ["set", "surrogate", "long bytes"])
def test_a_result_without_a_wire_form_is_an_error_at_once(shared: ActorProcess, kind: str) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            with pytest.raises((RemoteError, ProtocolError)):
                await probe.call("unsendable", kind, timeout_s=30.0)
            assert await probe.call("echo", "alive", timeout_s=30.0) == "alive"

    before = time.monotonic()
    run(main())
    assert time.monotonic() - before < 10.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "argument",
    [{1, 2}, bytes(33 << 20), ["x" * (9 << 20)] * 8],
    ids=["set", "long bytes", "long header"],
)
def test_an_argument_without_a_wire_form_is_an_error_at_once(
    shared: ActorProcess, argument: object
) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            with pytest.raises((TypeError, ValueError, OverflowError, ProtocolError)):
                await probe.call("echo", argument, timeout_s=30.0)
            assert await probe.call("echo", "alive", timeout_s=30.0) == "alive"

    before = time.monotonic()
    run(main())
    assert time.monotonic() - before < 10.0


@pytest.mark.parametrize("method", ["no_such", "_count", "__init__", "run", "_secret", "__dict__"])
def test_only_public_methods_can_be_called(shared: ActorProcess, method: str) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call(method, timeout_s=30.0)

    with pytest.raises(ActorNotFound, match=r"no method.*there are: .*echo"):
        run(main())


def test_wrong_arguments_are_the_callers_error(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call("echo", timeout_s=30.0)

    with pytest.raises(RemoteError, match="missing 1 required positional argument"):
        run(main())


def test_clients_leave_no_descriptor_behind(shared: ActorProcess) -> None:
    async def main() -> None:
        async with connected(shared.ref) as probe:
            await probe.call("pid", timeout_s=30.0)

    run(main())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run(main())

    assert len(os.listdir("/proc/self/fd")) == before
