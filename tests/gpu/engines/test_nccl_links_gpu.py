"""Weights from a rank on one GPU to an engine of another "node" on another, by NCCL and sockets."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from engine_runs import run_async
from far_pool import FarEngine, FarEngineInPool, far_engine
from ipc_pool import RankFailed, pool_of, rank_processes

from umbra.runtime.process.nvml import Nvml
from umbra.trainer.world import usable_gpus

GPUS = usable_gpus()[:2]  # here: the driver keeps descriptors of the question

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two CUDA devices"),
]

MIB = 1 << 20
NCCL = "nccl"
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "INFO",
}
RANK = SOCKETS | {"CUDA_VISIBLE_DEVICES": str(GPUS[0]) if GPUS else ""}
ENGINE = SOCKETS | {"CUDA_VISIBLE_DEVICES": str(GPUS[-1]) if GPUS else ""}


def used_mib(*processes: subprocess.Popen[bytes]) -> list[int]:
    """By the rank, and by the engine on the other GPU. By all processes on the GPU where NVML does
    not know them by their pids here."""
    nvml = Nvml.open(gpus=GPUS)
    assert nvml is not None
    try:
        uses = nvml.uses()[: len(processes)]
    finally:
        nvml.close()
    return [
        use.by_pid.get(process.pid, use.used_nbytes) // MIB
        for use, process in zip(uses, processes, strict=True)
    ]


def test_several_versions_arrive_by_nccl_bit_for_bit_in_constant_memory(tmp_path: Path) -> None:
    nccl_log = tmp_path / "nccl.log"
    used: list[list[int]] = []

    with (
        rank_processes(tmp_path, env=RANK | {"NCCL_DEBUG_FILE": str(nccl_log)}) as [rank],
        far_engine(ENGINE) as engine,
    ):

        async def body() -> None:
            async with pool_of(FarEngineInPool(engine), tmp_path, transport=NCCL) as coordinator:
                for version in range(1, 9):
                    report = await rank.publish(coordinator, version)
                    print(f"version {version}: {report}")
                    await coordinator.wait_settled()
                    assert report["transport"] == NCCL
                    assert list(report["engines"]) == ["engine"], report
                    assert engine.call("num_wrong", 1 if version % 2 else -1) == 0
                    used.append(used_mib(rank.process, engine.process))
                    rank.call("negate")

        rank.call("make", "mixed", 0, None)
        run_async(body)

    assert "via NET/Socket" in nccl_log.read_text()
    grown = [last - early for early, last in zip(used[1], used[-1], strict=True)]
    assert max(grown) <= 16, used


def test_only_what_has_changed_is_sent_by_nccl_and_arrives_bit_for_bit(tmp_path: Path) -> None:
    sent: list[int] = []
    settings = {"transport": NCCL, "full_sync_every": 100}

    with rank_processes(tmp_path, env=RANK) as [rank], far_engine(ENGINE) as engine:

        async def body() -> None:
            async with pool_of(FarEngineInPool(engine), tmp_path, **settings) as coordinator:
                for version, change in enumerate(["", "", "negate_first", "negate_first"], start=1):
                    if change:
                        rank.call(change)
                    report = await rank.publish(coordinator, version)  # with checksums
                    await coordinator.wait_settled()
                    assert list(report["engines"]) == ["engine"], report
                    sent.append(report["network_nbytes"])

        rank.call("make", "mixed", 0, None)
        run_async(body)
        assert engine.call("num_wrong", 1) == 0

    whole, unchanged, *deltas = sent
    assert 0 < unchanged < deltas[0] == deltas[1] < whole / 10


def test_a_receiver_killed_in_mid_transfer_costs_the_rank_one_sync(tmp_path: Path) -> None:
    used: list[list[int]] = []
    with rank_processes(tmp_path, env=RANK) as [rank]:
        rank.call("make", "mixed", 0, None)
        for attempt in range(3):
            with far_engine(ENGINE) as doomed:
                in_pool = FarEngineInPool(doomed)
                doomed.call("die_in_mid_transfer")
                begun_at = time.monotonic()

                async def lose_the_receiver(in_pool: FarEngineInPool = in_pool) -> None:
                    async with pool_of(in_pool, tmp_path, transport=NCCL) as coordinator:
                        with pytest.raises(RankFailed):
                            await rank.publish(coordinator, 1)
                        await coordinator.wait_settled()

                run_async(lose_the_receiver)
                took_s = time.monotonic() - begun_at
                assert in_pool.killed is not None

            with far_engine(ENGINE) as engine:

                async def again(engine: FarEngine = engine) -> None:
                    in_pool = FarEngineInPool(engine)
                    async with pool_of(in_pool, tmp_path, transport=NCCL) as coordinator:
                        report = await rank.publish(coordinator, 2)
                        await coordinator.wait_settled()
                        assert list(report["engines"]) == ["engine"], report

                run_async(again)
                assert engine.call("num_wrong", 1) == 0
                used.append(used_mib(rank.process))
            print(f"attempt {attempt}: {took_s:.1f} s until the rank had left, MiB used {used[-1]}")
            assert took_s < 30.0
        assert rank.process.poll() is None

    grown = [last - early for early, last in zip(used[0], used[-1], strict=True)]
    assert max(grown) <= 16, used
