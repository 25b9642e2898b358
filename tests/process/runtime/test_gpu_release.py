"""A dead engine's GPU memory is free before its successor starts: decided, and asked of NVML."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from actor_specs import actor
from fake_nvml import FakeGpu, FakeNvml
from watching import kill

from umbra.runtime.errors import ActorDied, DeadlineExceeded
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.nvml import GpuReading, GpuUse, Nvml, ReleaseWatch, gpu_memory_released
from umbra.runtime.session.session import Session

GIB = 1 << 30

HOLDING = FakeGpu(used_nbytes=60 * GIB, held_nbytes=55 * GIB, pid=4711)
FREE = FakeGpu(used_nbytes=5 * GIB)


def reading(used: float, held: float = 0.0) -> GpuReading:
    return GpuReading(indices=(0,), used_nbytes=(int(used * GIB),), held_nbytes=(int(held * GIB),))


def end_of(readings: list[GpuReading], interval_s: float = 0.1) -> int | None:
    """With which of them the wait is over."""
    watch = ReleaseWatch(now=100.0)
    for idx, each in enumerate(readings):
        if watch.observe(each, 100.0 + idx * interval_s):
            return idx
    return None


def test_the_wait_is_over_once_nothing_is_held_and_use_has_stopped_falling() -> None:
    assert end_of([reading(5.0)] * 10) == 2
    assert end_of([reading(60.0, 55.0)] * 5 + [reading(5.0)] * 5) == 7
    falling = [reading(60.0), reading(40.0), reading(20.0), reading(5.0)]
    assert end_of([*falling, *[reading(5.0)] * 5]) == 5


def test_memory_that_is_held_or_still_falls_is_reported() -> None:
    assert end_of([reading(60.0, 55.0)] * 100) is None
    watch = ReleaseWatch(now=0.0)
    watch.observe(reading(60.0, 55.0), 30.0)
    assert watch.describe(30.0) == "its processes still hold 55.0 GiB of GPU 0 30 s after its end"
    assert end_of([reading(60.0 - idx) for idx in range(50)]) is None


def test_use_that_grows_or_wavers_holds_nobody_up() -> None:
    assert end_of([reading(5.0 + idx) for idx in range(10)]) == 2
    assert end_of([reading(5.0 + 0.01 * (idx % 2)) for idx in range(10)]) == 2


def test_without_nvml_there_is_no_wait() -> None:
    began = time.monotonic()
    found = asyncio.run(
        gpu_memory_released([1], None, deadline_s=30.0, library="libnone-of-that-name.so.1")
    )
    assert found == ""
    assert time.monotonic() - began < 30.0


def test_nvml_reports_used_memory_and_its_holders(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(HOLDING)

    nvml = Nvml.open(fake_nvml.library)
    assert nvml is not None
    try:
        assert nvml.read([4711]) == reading(60.0, 55.0)
        assert nvml.read([12]) == reading(60.0)
        by_pid = {1: 5, 4711: 55 * GIB}
        use = GpuUse(total_nbytes=140 * GIB, used_nbytes=60 * GIB, by_pid=by_pid)
        assert nvml.uses() == [use]
    finally:
        nvml.close()


def used_gib(fake: FakeNvml, *gpus: str) -> list[int]:
    """Of each of the named GPUs; empty if NVML does not find one of them."""
    nvml = Nvml.open(fake.library, gpus=gpus)
    if nvml is None:
        return []
    try:
        return [use.used_nbytes // GIB for use in nvml.uses()]
    finally:
        nvml.close()


def test_named_gpus_are_reported_in_the_order_of_their_names(fake_nvml: FakeNvml) -> None:
    uuids = ("GPU-1a2b-77", "GPU-1a2c-88", "GPU-9d0e-99")
    gpus = [FakeGpu(uuid=uuid, used_nbytes=idx * GIB) for idx, uuid in enumerate(uuids)]
    fake_nvml.show(*gpus)

    assert used_gib(fake_nvml, "2", "0") == [2, 0]
    assert used_gib(fake_nvml, "GPU-9d0e-99", "1", "GPU-1a2b") == [2, 1, 0]
    assert used_gib(fake_nvml, "MIG-instance-of-1") == [1]
    nvml = Nvml.open(fake_nvml.library, gpus=["2", "GPU-1a2b-77"])
    assert nvml is not None
    assert nvml.read([]).indices == (2, 0)
    nvml.close()


@pytest.mark.parametrize("name", ["3", "GPU-1a2", "GPU-cc", "MIG-instance-of-3"])
def test_a_gpu_that_nvml_does_not_find_is_not_left_out_in_silence(
    fake_nvml: FakeNvml, name: str
) -> None:
    fake_nvml.show(*(FakeGpu(uuid=uuid) for uuid in ("GPU-1a2b", "GPU-1a2c", "GPU-9d0e")))

    assert used_gib(fake_nvml, "0", name) == []


def test_memory_that_is_never_freed_is_reported_at_the_deadline(
    fake_nvml: FakeNvml,
) -> None:
    fake_nvml.show(HOLDING)

    found = asyncio.run(
        gpu_memory_released([4711], None, deadline_s=0.3, library=fake_nvml.library)
    )

    assert found.startswith("its processes still hold 55.0 GiB of GPU 0")


def test_only_the_gpus_that_are_its_own_are_watched(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(HOLDING, replace(FREE, uuid="GPU-1"))

    def wait(*gpus: str) -> str:
        return asyncio.run(
            gpu_memory_released([4711], gpus, deadline_s=0.5, library=fake_nvml.library)
        )

    assert wait("1") == wait("GPU-1") == ""
    assert wait("1", "0").startswith("its processes still hold 55.0 GiB of GPU 0")


@pytest.mark.slow
def test_the_wait_lasts_until_the_memory_is_freed(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(HOLDING)

    async def body() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        loop.call_later(0.5, lambda: fake_nvml.show(FREE))
        assert (
            await gpu_memory_released([4711], None, deadline_s=30.0, library=fake_nvml.library)
            == ""
        )
        return loop.time() - began

    assert 0.5 < asyncio.run(body()) < 10.0


def test_a_job_that_ends_does_not_wait_for_memory(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(HOLDING)

    async def body() -> None:
        stop = asyncio.Event()
        stop.set()
        async with asyncio.timeout(30.0):
            await gpu_memory_released(
                [4711], None, deadline_s=30.0, stop=stop, library=fake_nvml.library
            )

    asyncio.run(body())


@pytest.mark.slow
def test_a_driver_that_hangs_does_not_hold_up_the_restart(fake_nvml: FakeNvml) -> None:
    state = fake_nvml.state
    state.unlink(missing_ok=True)
    os.mkfifo(state)  # to open it waits for a writer

    async def body() -> str:
        async with asyncio.timeout(30.0):
            found = await gpu_memory_released(
                [4711], None, deadline_s=0.1, library=fake_nvml.library
            )
        return found

    is_over = threading.Event()

    def let_go() -> None:
        while not is_over.wait(0.01):
            with contextlib.suppress(OSError):  # nobody reads just now
                os.close(os.open(state, os.O_WRONLY | os.O_NONBLOCK))

    writer = threading.Thread(target=let_go)
    with asyncio.Runner() as runner:
        found = runner.run(body())
        writer.start()  # the thread that asks ends with the runner
    is_over.set()
    writer.join(60.0)
    state.unlink()

    assert found.startswith("NVML did not report within 2.1 s")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("nvml_library_path")
@pytest.mark.parametrize("gpus", [None, ("1",)])
def test_an_engine_is_not_restarted_before_the_memory_of_the_last_is_free(
    fake_nvml: FakeNvml, umbra_session: Session, gpus: tuple[str, ...] | None
) -> None:
    fake_nvml.show(FREE, FREE)
    engine = umbra_session.spawn(actor("Engine", role="engine", gpus=gpus))
    pid = int(engine.call("who")["pid"])
    fake_nvml.show(FREE, replace(HOLDING, pid=pid))
    resolve = partial(umbra_session.supervisor_call, "resolve", engine.ref.name)

    kill(pid)

    with pytest.raises(DeadlineExceeded):
        resolve(2.0, engine.ref.incarnation)
    fake_nvml.show(FREE, FREE)
    assert resolve(20.0, engine.ref.incarnation).incarnation == engine.ref.incarnation + 1


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("nvml_library_path")
def test_an_engine_that_lacks_memory_at_its_first_start_reports_who_holds_it(
    fake_nvml: FakeNvml, umbra_session: Session
) -> None:
    fake_nvml.show(FakeGpu(used_nbytes=139 * GIB, held_nbytes=93 * GIB, pid=os.getpid()))
    environ = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}

    with pytest.raises(ActorDied) as died:
        umbra_session.create_pool(
            PoolSpec(
                name="policy",
                engine="short_engine:ShortEngine",
                count=1,
                kwargs={"at_start": [1]},
                env=environ,
            )
        )

    assert str(died.value).startswith(
        "policy-0#1 has too little GPU memory to start. "
        f"GPU 0: rank 0 (pid {os.getpid()}) holds 93.0 GiB, unknown processes and the driver hold "
        "46.0 GiB, 1.0 GiB of 140.0 GiB are free. Lower pool.kv_cache_num_tokens"
    )
    assert "policy-0#1 failed to start: EngineError: vLLM 0.26.0 did not start" in str(died.value)


HOLDER = """
import sys, torch
held = torch.zeros(20 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def nvml_opened_before() -> None:
    """The driver keeps some descriptors of a process's first use of NVML."""
    if (nvml := Nvml.open()) is not None:
        nvml.read([])
        nvml.close()


@pytest.mark.usefixtures("nvml_opened_before")
@pytest.mark.gpu
@pytest.mark.process
@pytest.mark.slow
def test_the_memory_of_a_killed_process_is_free_after_the_wait() -> None:
    nvml = Nvml.open()
    if nvml is None:
        pytest.skip("needs NVML")
    argv = [sys.executable, "-c", HOLDER]
    try:
        before = nvml.read([])
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"holding\n"
            holding = nvml.read([holder.pid])
            assert sum(holding.used_nbytes) - sum(before.used_nbytes) >= 20 * GIB

            holder.kill()
            holder.wait(60.0)
            at_its_end = nvml.read([holder.pid])
            began = time.monotonic()
            assert asyncio.run(gpu_memory_released([holder.pid], None, deadline_s=30.0)) == ""
            took_s = time.monotonic() - began

        after = nvml.read([holder.pid])
        left = [(sum(r.used_nbytes) - sum(before.used_nbytes)) / GIB for r in (at_its_end, after)]
        print(
            f"NVML knows the pid: {sum(holding.held_nbytes) > 0}; more used than before: "
            f"{left[0]:.2f} GiB when reaped, {left[1]:.2f} GiB {took_s:.2f} s later"
        )
        assert left[1] < 1.0
        assert not any(after.held_nbytes)
    finally:
        nvml.close()
