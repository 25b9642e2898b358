"""Syncs in which engines read the ranks' own memory: choice, contents, order, failures.

CPU storages stand in for a GPU's (`fake_ipc`); the real thing is in test_cuda_ipc_gpu.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_ipc import FakeIpc, FakeOpener
from local_world import LocalSupervisor, ThreadEngine, empty_like, in_threads, local_pool, raw_bytes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import EngineUnhealthy, WeightSyncError
from umbra.runtime.pools import engine_sync
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.exports.ipc_memory import MemoryExporter
from umbra.runtime.weights.shards import wire_manifest
from umbra.runtime.weights.sync_messages import SyncEnd, SyncReport

SMALL = SyncSettings(bucket_nbytes=512, verify_every=1)


def make_engine(ipc: FakeIpc, tensors: dict[str, Tensor], name: str = "engine") -> ThreadEngine:
    engine = ThreadEngine(name, empty_like(tensors), lambda: FakeOpener(ipc))
    engine.import_problem = ""
    return engine


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def publish(
    supervisor: LocalSupervisor, tensors: dict[str, Tensor], version: int = 1, **options: Any
) -> SyncReport:
    session = supervisor.as_rank(options.pop("rank", 0), options.pop("world_size", 1))
    on_read = options.pop("on_read", None)
    with closing(WeightPublisher(session, tensors, **options)) as publisher:
        return publisher.publish("pool", version, 20.0, on_read)


def sources() -> dict[str, Tensor]:
    """Two share one storage, one is transposed, one is tied."""
    shared = torch.randn(20, 9)
    return {
        "a": shared[:7],
        "b": shared[7:],
        "transposed": torch.randn(5, 3).t(),
        "ids": torch.arange(70),
        "tied": shared[:7],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def test_tensors_are_cast_on_the_way_and_shared_storages_opened_once(ipc: FakeIpc) -> None:
    tensors = sources()
    expected = {
        name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()
    }
    engine = make_engine(ipc, expected)
    engine.destinations = engine.destinations | {"transposed": torch.empty(5, 3).bfloat16().t()}
    with local_pool([engine], SMALL) as supervisor:
        report = publish(
            supervisor, tensors, manifest=wire_manifest(tensors, torch.bfloat16), export=ipc.export
        )

    assert report.transport == "cuda_ipc"
    for name, tensor in expected.items():
        assert raw_bytes(engine.destinations[name]) == raw_bytes(tensor), name
    assert len(ipc.opened) == len(set(ipc.opened)) == 4
    nbytes = sum(len(raw_bytes(t)) for name, t in expected.items() if name != "tied")
    assert report.engines["engine"]["nbytes"] == nbytes
    assert engine.lifecycle.state == EngineState.SERVING


@pytest.mark.parametrize("is_staged", [False, True])
def test_engines_stage_what_they_read_if_the_pool_is_set_so(ipc: FakeIpc, is_staged: bool) -> None:
    engine = make_engine(ipc, {"a": torch.zeros(7)})
    with local_pool([engine], replace(SMALL, staged_updates=is_staged)) as supervisor:
        publish(supervisor, {"a": torch.randn(7)}, export=ipc.export)

    assert engine.buckets["is_staged"] is is_staged


def replicated_shards(tensor: Tensor) -> list[DTensor]:
    """HSDP: on each of four ranks, half of a tensor; ranks 0 and 2 have the same, and 1 and 3."""
    shards: list[DTensor] = []
    for rank in range(4):
        torch.distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            local = tensor.chunk(2)[mesh.get_local_rank(1)].clone()
            placements = [Replicate(), Shard(0)]
            size, steps = tensor.shape, tensor.stride()
            shards.append(DTensor.from_local(local, mesh, placements, shape=size, stride=steps))
        finally:
            torch.distributed.destroy_process_group()
    return shards


def publish_from_gpus(
    supervisor: LocalSupervisor, ipc: FakeIpc, tensors: Sequence[dict[str, Tensor]]
) -> list[Any]:
    """The outcome of each rank, which has a GPU of its own."""
    return in_threads(
        *(
            partial(
                *(publish, supervisor, own),
                rank=rank,
                world_size=len(tensors),
                export=partial(ipc.export, gpu=rank),
            )
            for rank, own in enumerate(tensors)
        )
    )


@pytest.mark.parametrize(
    ("gpu", "holders"),
    [(0, {0, 1}), (1, {0, 1}), (2, {0, 1, 2}), (3, {0, 3}), (4, {0, 1}), (None, set[int]())],
)
def test_a_replica_on_the_engine_s_own_gpu_is_read(
    ipc: FakeIpc, gpu: int | None, holders: set[int]
) -> None:
    """Without a GPU, the first of them writes to host memory."""
    weight = torch.randn(5, 4)
    bias = torch.randn(3)  # no DTensor: from rank 0
    engine = ThreadEngine(
        "engine", empty_like({"weight": weight, "bias": bias}), lambda: FakeOpener(ipc, gpu or 0)
    )
    if gpu is not None:
        engine.import_problem = ""
    with local_pool([engine], SMALL) as supervisor:
        outcomes = publish_from_gpus(
            supervisor,
            ipc,
            [{"weight": shard, "bias": bias.clone()} for shard in replicated_shards(weight)],
        )

    assert {outcome.transport for outcome in outcomes} == {"memfd" if gpu is None else "cuda_ipc"}
    assert torch.equal(engine.destinations["weight"], weight)
    assert torch.equal(engine.destinations["bias"], bias)
    assert {int.from_bytes(opened.device, "big") for opened in ipc.opened} == holders


def test_replicas_that_differ_fail_the_sync_and_no_engine(ipc: FakeIpc) -> None:
    weight = torch.randn(5, 4)
    shards = replicated_shards(weight)
    shards[2].to_local()[0, 0] += 1.0
    engine = make_engine(ipc, {"weight": weight})
    with local_pool([engine], SMALL) as supervisor:
        outcomes = publish_from_gpus(supervisor, ipc, [{"weight": shard} for shard in shards])

    assert all("replicas of a shard must be equal" in str(outcome) for outcome in outcomes)
    assert engine.killed is None


def test_without_checksums_and_work_of_ranks_an_engine_commits_when_it_has_loaded(
    ipc: FakeIpc,
) -> None:
    class EndsAfterCommit(LocalSupervisor):
        def sync(self, message: Any) -> Any:
            if isinstance(message, SyncEnd):
                until(lambda: "commit_update" in engine.log)
            return super().sync(message)

    tensors = {"a": torch.randn(7)}
    engine = make_engine(ipc, tensors)
    with local_pool([engine], replace(SMALL, verify_every=1000)) as plain:
        publish(plain, tensors, export=ipc.export)
        assert "verify_update" in engine.log  # of the first version
        engine.log.clear()
        late = EndsAfterCommit(plain.loop, plain.coordinator)
        publish(late, tensors, version=2, export=ipc.export)

    assert "verify_update" not in engine.log


class Unable(ThreadEngine):
    """Cannot open what the ranks export as version 2."""

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
    ) -> None:
        await super().prepare_update(version, manifest, buckets, timeout_s)
        if version == 2:
            self.hanging.set()
            raise EngineUnhealthy("the memory cannot be opened")


@pytest.mark.parametrize("is_rank_lost", [True, False])
def test_an_engine_that_cannot_open_the_memory_of_a_lost_rank_is_not_to_blame(
    ipc: FakeIpc, is_rank_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory goes with the rank's process, whose end the supervisor sees a little later."""
    monkeypatch.setattr(engine_sync, "_RANK_NEWS_LIMIT_S", 3.0 if is_rank_lost else 0.2)
    engine = Unable("engine", {"a": torch.zeros(7)}, lambda: FakeOpener(ipc))
    engine.import_problem = ""

    def lose() -> None:
        if is_rank_lost:
            until(engine.hanging.is_set)
            time.sleep(0.2)
            supervisor.lose_rank(0, engine.hanging)

    def publish_in_vain() -> None:
        with pytest.raises(WeightSyncError):
            publish(supervisor, {"a": torch.randn(7)}, 2, export=ipc.export)

    with local_pool([engine], SMALL) as supervisor:
        publish(supervisor, {"a": torch.randn(7)}, 1, export=ipc.export)
        in_threads(publish_in_vain, lose)

        assert str(engine.lifecycle) == ("SERVING(1)" if is_rank_lost else "DEAD")


def numbered(version: int) -> dict[str, Tensor]:
    return {"a": torch.full((7, 3), float(version)), "b": torch.full((5,), -float(version))}


def fill(tensors: dict[str, Tensor], version: int) -> None:
    for name, values in numbered(version).items():
        tensors[name].copy_(values)


def test_memory_that_stays_is_opened_once_for_all_versions(ipc: FakeIpc) -> None:
    tensors = numbered(0)
    engine = make_engine(ipc, tensors)
    with local_pool([engine], SMALL) as supervisor:
        for version in range(1, 5):
            fill(tensors, version)
            publish(supervisor, tensors, version, export=ipc.export)
            for name, values in numbered(version).items():
                assert torch.equal(engine.destinations[name], values)

    assert len(ipc.opened) == ipc.num_open == 2
    engine.unmap()
    assert ipc.num_open == 0


def test_memory_that_moved_is_opened_again_after_the_old_one_was_closed(ipc: FakeIpc) -> None:
    tensors = numbered(0)
    engine = make_engine(ipc, tensors)
    with local_pool([engine], SMALL) as supervisor:
        for version in range(1, 5):
            tensors["a"] = torch.empty_like(tensors["a"])
            fill(tensors, version)
            publish(supervisor, tensors, version, export=ipc.export)
            for name, values in numbered(version).items():
                assert torch.equal(engine.destinations[name], values)

    assert len(ipc.opened) == 2 + 3
    assert ipc.most_open == 2


def test_memory_that_does_not_stay_is_closed_before_ranks_go_on(ipc: FakeIpc) -> None:
    tensors = numbered(1)
    engine = make_engine(ipc, tensors)
    open_when_read: list[int] = []
    with local_pool([engine], SMALL) as supervisor:
        for version in (1, 2):
            publish(
                *(supervisor, tensors, version),
                export=ipc.export,
                keeps_memory=False,
                on_read=lambda: open_when_read.append(ipc.num_open),
            )

    assert open_when_read == [0, 0]
    assert len(ipc.opened) == 4


@pytest.mark.parametrize("is_exported", [True, False])
@pytest.mark.parametrize("keeps_memory", [True, False])
def test_what_keeps_a_rank_s_memory_ends_before_the_rank_frees_it(
    ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch, is_exported: bool, keeps_memory: bool
) -> None:
    """Also if the weights went another way."""
    events: list[str] = []

    def release(exporter: MemoryExporter) -> None:
        events.append("released")

    monkeypatch.setattr(MemoryExporter, "release", release)
    tensors = numbered(1)
    engine = make_engine(ipc, tensors)
    transport = "auto" if is_exported else "memfd"
    with local_pool([engine], replace(SMALL, transport=transport)) as supervisor:
        report = publish(
            *(supervisor, tensors, 1),
            export=ipc.export,
            keeps_memory=keeps_memory,
            on_read=lambda: events.append("read"),
        )

    assert report.transport == ("cuda_ipc" if is_exported else "memfd")
    ended = events[: events.index("read") + 1]
    assert ended == (["read"] if keeps_memory else ["released", "read"])


def test_memory_is_closed_when_weights_come_another_way(ipc: FakeIpc) -> None:
    tensors = numbered(1)
    engine = make_engine(ipc, tensors)
    with local_pool([engine], SMALL) as supervisor:
        publish(supervisor, tensors, 1, export=ipc.export)
        assert ipc.num_open == 2
        report = publish(supervisor, tensors, 2)

    assert report.transport == "memfd"
    assert ipc.num_open == 0


def test_an_engine_at_rest_holds_no_memory_of_ranks(ipc: FakeIpc) -> None:
    tensors = numbered(1)
    engine = make_engine(ipc, tensors)
    with local_pool([engine], SMALL) as supervisor:
        publish(supervisor, tensors, 1, export=ipc.export)
        engine.sleep(2)
        assert ipc.num_open == 2

        supervisor.loop.run(engine.abort_update(10.0))

    assert ipc.num_open == 0


def test_one_rank_without_a_gpu_sends_all_through_host_memory(
    ipc: FakeIpc, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tensors = {"a": torch.randn(100)}
    engine = make_engine(ipc, tensors)
    with local_pool([engine], SMALL) as supervisor:
        for version in (1, 2):
            outcomes = in_threads(
                partial(
                    *(publish, supervisor, tensors, version),
                    rank=0,
                    world_size=2,
                    export=ipc.export,
                ),
                partial(publish, supervisor, tensors, version, rank=1, world_size=2),
            )
            # Rank 1 has nothing to export and nothing to refuse.
            assert [report.transport for report in outcomes] == ["cuda_ipc"] * 2
        engine.log.clear()
        report = publish(supervisor, tensors, 3)

    assert report.transport == "memfd"
    assert raw_bytes(engine.destinations["a"]) == raw_bytes(tensors["a"])
    said = [record.getMessage() for record in caplog.records if "travel by" in record.getMessage()]
    assert len(said) == 2
    assert "cpu memory" in said[1]


def test_an_engine_that_cannot_open_falls_back_with_one_warning(
    ipc: FakeIpc, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"a": torch.randn(100)}
    able, unable = make_engine(ipc, tensors, "able"), make_engine(ipc, tensors, "unable")
    unable.import_problem = "not permitted"
    with local_pool([able, unable], SMALL) as supervisor:
        reports = [publish(supervisor, tensors, v, export=ipc.export) for v in (1, 2, 3)]
        unable.incarnation, unable.import_problem = 2, ""
        again = publish(supervisor, tensors, 4, export=ipc.export)

    assert [report.transport for report in reports] == ["memfd"] * 3
    assert again.transport == "cuda_ipc"
    assert (len(able.probed), len(unable.probed)) == (1, 2)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "unable: not permitted" in warnings[0]
    for engine in (able, unable):
        assert raw_bytes(engine.destinations["a"]) == raw_bytes(tensors["a"])


def test_an_unavailable_transport_is_an_error_with_the_reason(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(100)}
    engine = make_engine(ipc, tensors)
    with local_pool([engine], replace(SMALL, transport="cuda_ipc")) as supervisor:
        with pytest.raises(WeightSyncError, match=r"'cuda_ipc' is unavailable: rank 0: .*in cpu"):
            publish(supervisor, tensors)
        assert engine.log == []
        report = publish(supervisor, tensors, 2, export=ipc.export)

    assert report.transport == "cuda_ipc"


def test_an_abort_does_not_wait_for_an_engine_that_hangs_at_its_trial(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(100)}
    engine = make_engine(ipc, tensors)
    engine.hang_at = "probe_import"
    with local_pool([engine], SMALL) as supervisor:
        outcome, settled_after_s = in_threads(
            partial(publish, supervisor, tensors, export=ipc.export),
            partial(supervisor.lose_rank, 0, when=engine.hanging),
        )
        engine.hang_at = None
        report = publish(supervisor, tensors, 2, export=ipc.export)

    assert isinstance(outcome, WeightSyncError)
    assert settled_after_s < 5.0
    assert report.transport == "cuda_ipc"


def test_host_memory_can_be_asked_for(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(100)}
    engine = make_engine(ipc, tensors)
    with local_pool([engine], replace(SMALL, transport="memfd")) as supervisor:
        report = publish(supervisor, tensors, export=ipc.export)

    assert report.transport == "memfd"
    assert engine.probed == []


@pytest.mark.slow
def test_ranks_keep_their_memory_until_engines_have_read_it(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(7, 5)}
    expected = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    engine = make_engine(ipc, tensors)
    engine.sleep(2)
    first_has_read, logs = threading.Event(), list[list[str]]()

    def clear(rank: int) -> None:
        if rank == 0:  # the other one waits: no engine may go on yet
            first_has_read.set()
        else:
            first_has_read.wait(10.0)
            while "verify_update" not in engine.log:
                time.sleep(0.005)
            time.sleep(0.3)  # long enough for the engine to go on, if it did not wait
            logs.append(list(engine.log))
        for tensor in tensors.values():
            tensor.zero_()

    with local_pool([engine], SMALL) as supervisor:
        outcomes = in_threads(
            *(
                partial(
                    *(publish, supervisor, tensors),
                    rank=rank,
                    world_size=2,
                    export=ipc.export,
                    on_read=partial(clear, rank),
                )
                for rank in range(2)
            )
        )

    assert all(isinstance(outcome, SyncReport) for outcome in outcomes), outcomes
    for name, data in expected.items():
        assert raw_bytes(engine.destinations[name]) == data
    assert "load" in logs[0]
    assert "commit_update" not in logs[0]
    assert "commit_update" in engine.log


def test_corruption_after_the_copy_is_found(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(10)}
    broken, sound = (make_engine(ipc, tensors, name) for name in ("broken", "sound"))
    broken.corrupts_after_load = True
    with local_pool([broken, sound], SMALL) as supervisor:
        report = publish(supervisor, tensors, export=ipc.export)

    assert list(report.engines) == ["sound"]
    assert "corrupted on arrival: a bytes [0, 4000)" in report.failed["broken"]
    assert broken.killed is not None


def test_memory_that_cannot_be_opened_after_all_costs_the_engine(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(1000)}
    engine = make_engine(ipc, tensors)
    with local_pool([engine], SMALL, require_engine=False) as supervisor:
        ipc.unusable = "no more mappings"
        report = publish(supervisor, tensors, export=ipc.export)

    assert "load: no more mappings" in report.failed["engine"]
    assert engine.killed is not None


def test_a_rank_that_aborts_leaves_the_engine_waiting_for_weights(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(1000)}
    engine = make_engine(ipc, tensors)

    def fail() -> None:
        raise RuntimeError("no memory on the host")

    with local_pool([engine], SMALL) as supervisor:
        with pytest.raises(RuntimeError, match="no memory on the host"):
            publish(supervisor, tensors, export=ipc.export, on_read=fail)
        supervisor.loop.run(supervisor.coordinator.wait_settled())
        assert engine.lifecycle.state == EngineState.PENDING_WEIGHTS
        assert engine.killed is None
        assert ipc.num_open == 0

        report = publish(supervisor, tensors, 2, export=ipc.export)

    assert list(report.engines) == ["engine"]
    assert engine.lifecycle.state == EngineState.SERVING


class Dying(FakeOpener):
    """Tells of every tensor that is read; the sync ends while the second one is."""

    def __init__(self, ipc: FakeIpc, die: Callable[[], None], reads: list[bytes]) -> None:
        super().__init__(ipc)
        self._die = die
        self._reads = reads

    def open(self, allocation: Any) -> Tensor:
        self._reads.append(allocation.handle)
        if len(self._reads) == 2:
            self._die()
        return super().open(allocation)


def test_an_engine_stops_reading_once_a_rank_has_died(ipc: FakeIpc) -> None:
    tensors = {f"t{idx}": torch.randn(50) for idx in range(6)}
    reads: list[bytes] = []
    with local_pool(engines := list[ThreadEngine](), SMALL) as supervisor:

        async def lose() -> None:
            supervisor.coordinator.rank_lost(0)

        def die() -> None:
            supervisor.loop.run(lose())

        engine = ThreadEngine("engine", empty_like(tensors), lambda: Dying(ipc, die, reads))
        engine.import_problem = ""
        engines.append(engine)
        with pytest.raises(WeightSyncError, match="rank 0 is lost"):
            publish(supervisor, tensors, export=ipc.export)
        supervisor.loop.run(supervisor.coordinator.wait_settled())

    assert len(reads) == 2
    assert engine.lifecycle.state == EngineState.PENDING_WEIGHTS
    assert engine.killed is None
    assert ipc.num_open == 0
