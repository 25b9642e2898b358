"""Weights read from the GPU memory of other processes: contents, failures, memory given back."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Collector, Engine, collect, run_async, running, wire_request
from ipc_pool import (
    EngineInPool,
    RankFailed,
    RankProcess,
    TensorsOnly,
    in_device_memory,
    pool_of,
    rank_processes,
)
from ipc_rank import DEVICE, mixed_tensors
from torch import Tensor

from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.pools.sync_coordinator import SyncCoordinator
from umbra.runtime.weights.exports.cuda_driver import cuda_driver
from umbra.runtime.weights.exports.ipc_memory import CudaOpener, MemoryExporter, probe_import
from umbra.runtime.weights.image.fd_server import MAX_FDS
from umbra.runtime.weights.rank_exports import Allocation, ChunksHandle, RankExports
from umbra.trainer.world.mesh import usable_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPUS = usable_gpus()[:1]  # here: the driver keeps descriptors of the question
MIB = 1 << 20
IPC = "cuda_ipc"
_SETTING = "expandable_segments:True"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": _SETTING, "PYTORCH_ALLOC_CONF": _SETTING}
"""Variables of ranks whose memory has descriptors and no handle. Torch has renamed the setting."""


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        arrived = found[name].cpu()
        num_wrong = int((arrived != tensor).sum())
        assert num_wrong == 0, f"{name}: {num_wrong} of {tensor.numel()} elements are wrong"


async def publish_all(
    coordinator: SyncCoordinator, ranks: list[RankProcess], version: int
) -> dict[str, Any]:
    reports = await asyncio.gather(*(rank.publish(coordinator, version) for rank in ranks))
    await coordinator.wait_settled()
    print(f"version {version}: {reports[0]}")
    assert not reports[0]["failed"], reports[0]
    return reports[0]


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_tensors_of_another_process_arrive_bit_for_bit(tmp_path: Path, wire: str | None) -> None:
    tensors = mixed_tensors(0)
    expected = tensors if wire is None else cast(tensors, torch.bfloat16)
    destinations = in_device_memory(expected)
    engine = TensorsOnly(destinations)

    async def body() -> None:
        async with pool_of(EngineInPool(engine), tmp_path) as coordinator:
            report = await publish_all(coordinator, ranks, 1)
            assert report["transport"] == IPC, "the log says why"
            check_equal(destinations, expected)
            ranks[0].call("negate")
            await publish_all(coordinator, ranks, 2)
            check_equal(destinations, {name: -tensor for name, tensor in expected.items()})

    with rank_processes(tmp_path) as ranks:
        ranks[0].call("make", "mixed", 0, wire)
        run_async(body)
    engine.close()


def test_shards_of_two_ranks_make_up_whole_tensors(tmp_path: Path) -> None:
    tensors = mixed_tensors(0)
    expected = cast(tensors, torch.bfloat16)
    destinations = in_device_memory(expected)
    engine = TensorsOnly(destinations)

    async def body() -> None:
        async with pool_of(EngineInPool(engine), tmp_path) as coordinator:
            assert (await publish_all(coordinator, ranks, 1))["transport"] == IPC
            check_equal(destinations, expected)

    with rank_processes(tmp_path, 2) as ranks:
        for rank in ranks:
            rank._connection.send(("make", ("mixed", 0, "bfloat16", True)))  # pyright: ignore[reportPrivateUsage]
        for rank in ranks:
            rank.wait_done()
        run_async(body)
    engine.close()


class Counting(CudaOpener):
    """`opened` has an entry for each time that the driver opened something."""

    def __init__(self, opened: list[Allocation]) -> None:
        super().__init__()
        self.opened = opened

    def open(self, allocation: Allocation) -> Tensor:
        if allocation not in self._opened:
            self.opened.append(allocation)
        return super().open(allocation)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_memory_that_stays_open_brings_every_version_bit_for_bit(
    tmp_path: Path, wire: str | None
) -> None:
    tensors = mixed_tensors(0)
    expected = tensors if wire is None else cast(tensors, torch.bfloat16)
    destinations = in_device_memory(expected)
    opened: list[Allocation] = []
    engine = TensorsOnly(destinations, lambda: Counting(opened))

    async def body() -> None:
        async with pool_of(EngineInPool(engine), tmp_path) as coordinator:
            for version in range(1, 9):
                ranks[0].call("negate")  # left to run on the GPU
                assert (await publish_all(coordinator, ranks, version))["transport"] == IPC
                sign = (-1) ** version
                check_equal(destinations, {n: sign * tensor for n, tensor in expected.items()})
                num_opened.append(len(opened))

    num_opened: list[int] = []
    with rank_processes(tmp_path) as ranks:
        ranks[0].call("make", "mixed", 0, wire)
        run_async(body)
    engine.close()
    assert num_opened == [num_opened[0]] * 8
    assert len(set(opened)) == len(opened)


@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["handles", "segments"])
@pytest.mark.parametrize("keeps_memory", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_rank_s_memory_is_free_again_once_the_engine_has_closed_it(
    tmp_path: Path, keeps_memory: bool, is_killed: bool, env: dict[str, str]
) -> None:
    """At the end of each sync if the rank says so, otherwise when ranks may have ended."""
    shapes = {f"t{idx}": (64 * MIB // 4,) for idx in range(8)}
    destinations = {name: torch.zeros(shape, device=DEVICE) for name, shape in shapes.items()}
    engine = TensorsOnly(destinations)

    def free_mib() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] // MIB

    async def body() -> None:
        async with pool_of(EngineInPool(engine), tmp_path) as coordinator:
            for version in range(1, 6):
                assert (await publish_all(coordinator, ranks, version))["transport"] == IPC

    without_rank = free_mib()
    with rank_processes(tmp_path, env=env) as ranks:
        before = free_mib()
        ranks[0].call("make_uniform", shapes, None, keeps_memory)
        held = before - free_mib()
        run_async(body)
        if is_killed:
            ranks[0].process.send_signal(signal.SIGKILL)
            ranks[0].process.wait()
            before = without_rank
        else:
            ranks[0].call("release")
        while_open = before - free_mib()
        run_async(engine.abort_update)
        left = before - free_mib()
    engine.close()

    print(f"MiB held by 512 MiB of tensors {held}, freed by the rank {while_open}, at last {left}")
    assert all(bool((tensor == 0.5).all()) for tensor in destinations.values())
    assert held >= 500
    assert keeps_memory or while_open <= 100  # what CUDA loads on first use
    assert left <= 100


class Corrupting(TensorsOnly):
    """Changes one bit of a tensor between the transfer and its verification."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        super().__init__(tensors)
        self._bytes = tensors[name].view(-1).view(torch.uint8)

    async def load(self) -> dict[str, int]:
        report = await super().load()
        self._bytes[len(self._bytes) // 2] ^= 1
        return report


@pytest.mark.parametrize("name", ["large", "transposed", "ids", "scalar"])
def test_an_engine_with_one_wrong_bit_never_serves(tmp_path: Path, name: str) -> None:
    destinations = in_device_memory(cast(mixed_tensors(0), torch.bfloat16))
    engine = Corrupting(destinations, name)
    in_pool = EngineInPool(engine)

    async def body() -> None:
        async with pool_of(in_pool, tmp_path) as coordinator:
            with pytest.raises(RankFailed, match=f"corrupted on arrival: {name} bytes"):
                await ranks[0].publish(coordinator, 1)
            await coordinator.wait_settled()

    with rank_processes(tmp_path) as ranks:
        ranks[0].call("make", "mixed", 0, "bfloat16")
        run_async(body)
    engine.close()
    assert in_pool.killed is not None
    assert in_pool.lifecycle.state == EngineState.DEAD


def test_a_rank_that_aborts_leaves_the_engine_waiting_for_weights(tmp_path: Path) -> None:
    tensors = mixed_tensors(0)
    destinations = in_device_memory(tensors)
    engine = TensorsOnly(destinations)
    in_pool = EngineInPool(engine)

    async def body() -> None:
        async with pool_of(in_pool, tmp_path) as coordinator:
            with pytest.raises(RankFailed, match="no memory on the host"):
                await ranks[0].publish(coordinator, 1, error="no memory on the host")
            await coordinator.wait_settled()
            assert in_pool.lifecycle.state == EngineState.PENDING_WEIGHTS
            assert in_pool.killed is None
            assert (await publish_all(coordinator, ranks, 2))["transport"] == IPC
            assert in_pool.lifecycle.state == EngineState.SERVING
            check_equal(destinations, tensors)

    with rank_processes(tmp_path) as ranks:
        ranks[0].call("make", "mixed", 0, None)
        run_async(body)
    engine.close()


def test_a_rank_that_is_killed_while_it_is_read_costs_no_engine(tmp_path: Path) -> None:
    tensors = mixed_tensors(0)
    destinations = in_device_memory(tensors)
    told: list[Callable[[], None]] = []

    class Killing(CudaOpener):
        """Kills the rank once its first allocation is open."""

        def open(self, allocation: Allocation) -> Tensor:
            memory = super().open(allocation)
            if told:
                told.pop()()
            return memory

    engine = TensorsOnly(destinations, Killing)
    in_pool = EngineInPool(engine)

    async def kill_while_reading() -> None:
        async with pool_of(in_pool, tmp_path) as coordinator:
            loop = asyncio.get_running_loop()

            def kill() -> None:
                ranks[0].process.send_signal(signal.SIGKILL)
                ranks[0].process.wait()
                loop.call_soon_threadsafe(coordinator.rank_lost, 0)

            told.append(kill)
            with pytest.raises(RankFailed):
                await ranks[0].publish(coordinator, 1)
            await coordinator.wait_settled()
        assert told == []
        assert in_pool.killed is None
        assert in_pool.lifecycle.state == EngineState.PENDING_WEIGHTS

    async def again() -> None:
        async with pool_of(in_pool, tmp_path) as coordinator:
            assert (await publish_all(coordinator, ranks, 2))["transport"] == IPC
            check_equal(destinations, tensors)

    for body in (kill_while_reading, again):
        with rank_processes(tmp_path) as ranks:
            ranks[0].call("make", "mixed", 0, None)
            run_async(body)
    engine.close()


@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["handles", "segments"])
def test_memory_that_the_rank_allocated_again_is_opened_again(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """Values change in place, then in memory that was freed and allocated again, also at the same
    address, which only the driver's number tells from the old memory."""
    tensors = mixed_tensors(0)
    destinations = in_device_memory(tensors)
    opened: list[Allocation] = []
    engine = TensorsOnly(destinations, lambda: Counting(opened))

    async def body() -> None:
        async with pool_of(EngineInPool(engine), tmp_path) as coordinator:
            for version in range(1, 8):
                if version > 4:
                    is_same_address = ranks[0].call("move", "large")
                    print(f"same address: {is_same_address}")
                ranks[0].call("negate")  # left to run on the GPU
                assert (await publish_all(coordinator, ranks, version))["transport"] == IPC
                sign = (-1) ** version
                check_equal(destinations, {n: sign * tensor for n, tensor in tensors.items()})
                num_opened.append(len(opened))

    num_opened: list[int] = []
    with rank_processes(tmp_path, env=env) as ranks:
        ranks[0].call("make", "mixed", 0, None)
        run_async(body)
    engine.close()
    assert {isinstance(each.handle, ChunksHandle) for each in opened} == {bool(env)}, opened
    assert num_opened[:4] == [num_opened[0]] * 4
    assert num_opened[3] < num_opened[4] < num_opened[5] < num_opened[6]
    assert len(set(opened)) == len(opened)


@pytest.mark.parametrize("keeps_memory", [False, True])
def test_descriptors_of_expandable_segments_stay_only_with_their_memory(
    tmp_path: Path, keeps_memory: bool
) -> None:
    """And large ones need more descriptors than one packet holds."""
    shapes = {f"t{idx}": (1 << 20, 256) for idx in range(6)}  # 6 GiB, 308 chunks of 20 MiB
    destinations = {name: torch.zeros(shape, device=DEVICE) for name, shape in shapes.items()}
    engine = TensorsOnly(destinations)

    async def body() -> None:
        async with pool_of(EngineInPool(engine), tmp_path, verify_every=1 << 20) as coordinator:
            server = coordinator._memory._fd_server  # pyright: ignore[reportPrivateUsage]
            for version in range(1, 4):
                sign = (-1) ** version
                ranks[0].call("negate")
                assert (await publish_all(coordinator, ranks, version))["transport"] == IPC
                for name, tensor in destinations.items():
                    assert bool((tensor == sign * 0.5).all()), name
                num_deposited.append(server.num_deposited)
            await asyncio.to_thread(ranks[0].call, "release")
            num_deposited.append(server.num_deposited)

    num_deposited: list[int] = []
    with rank_processes(tmp_path, env=EXPANDABLE) as ranks:
        ranks[0].call("make_uniform", shapes, None, keeps_memory)
        run_async(body)
    engine.close()
    print(f"descriptors at the server: {num_deposited}")
    if keeps_memory:
        assert num_deposited == [num_deposited[0]] * 3 + [0]
        assert num_deposited[0] > MAX_FDS
    else:
        assert num_deposited == [0] * 4


def test_memory_that_cannot_be_exported_goes_through_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tensors = mixed_tensors(0)
    destinations = in_device_memory(tensors)
    engine = TensorsOnly(destinations)

    async def body() -> None:
        async with pool_of(EngineInPool(engine), tmp_path) as coordinator:
            assert (await publish_all(coordinator, ranks, 1))["transport"] == "memfd"
            check_equal(destinations, tensors)

    # Nobody serves descriptors there.
    with rank_processes(tmp_path, env=EXPANDABLE, fd_socket="none") as ranks:
        ranks[0].call("make", "mixed", 0, None)
        run_async(body)
    engine.close()
    assert "travel by memfd: rank 0: its memory cannot be exported" in caplog.text


def test_what_cannot_be_opened_is_named() -> None:
    own = torch.ones(5, device=DEVICE)
    exported = MemoryExporter("").export([(0, own)])
    assert isinstance(exported, RankExports), exported
    here = cuda_driver().device_uuids()[torch.cuda.current_device()]
    assert exported.allocations[0].device == here
    assert exported.allocations[0].nbytes >= exported.parts[0].start + 20

    elsewhere = Allocation(bytes(16), exported.allocations[0].handle, MIB, 0)
    broken = Allocation(here, bytes(64), MIB, 0)

    assert "is not among the" in probe_import([elsewhere.to_wire()])
    assert "cuIpcOpenMemHandle_v2 failed" in probe_import([broken.to_wire()])
    assert own.sum().item() == 5


async def greedy(engine: Engine) -> list[list[int]]:
    collector = Collector()
    await engine.submit([wire_request(i, [i] * 40, temperature=0.0) for i in range(8)])
    await collect(engine, collector, 8)
    return [collector[i].tokens for i in range(8)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_engine_generates_by_the_weights_it_has_read(
    model_folder: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    async def body() -> None:
        engine = EmbeddedEngine(
            model_path=str(model_folder("qwen3")),
            device=DEVICE,
            dtype=dtype,
            max_context_len=512,
            kv_cache_num_tokens=1 << 14,
        )
        in_pool = EngineInPool(engine)
        async with running(engine):
            outputs: list[list[list[int]]] = []
            for transport in ("memfd", IPC):
                async with pool_of(in_pool, tmp_path, transport=transport) as coordinator:
                    for seed in (1, 2):
                        ranks[0].call("make", "qwen3", seed, dtype)
                        version = len(outputs) + 1
                        report = await publish_all(coordinator, ranks, version)
                        assert report["transport"] == transport
                        outputs.append(await greedy(engine))

        assert outputs[0] != outputs[1]
        assert outputs[2:] == outputs[:2]

    with rank_processes(tmp_path) as ranks:
        run_async(body)
