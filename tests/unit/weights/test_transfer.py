"""Tensors arrive bit for bit, whatever their layout: publisher, memfds or links, and
receivers, in threads."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_world import (
    IMAGE_TRANSPORTS,
    LocalSupervisor,
    ThreadEngine,
    empty_like,
    in_threads,
    local_pool,
    next_version,
    raw_bytes,
)
from torch import Tensor

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.manifest import ITEMSIZES
from umbra.runtime.weights.shards import wire_manifest
from umbra.runtime.weights.sync_messages import SyncGrant, SyncReport

SMALL = SyncSettings(bucket_nbytes=512, verify_every=1)
strides = st.sampled_from(["contiguous", "transposed", "every second", "expanded"])
drawn_tensors = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEMSIZES)),
        st.lists(st.integers(0, 13), max_size=3),
        strides,
        strides,
    ),
    max_size=8,
)


def random_tensor(dtype: str, shape: list[int], layout: str, seed: int) -> Tensor:
    """Random bytes as `dtype` (so also NaNs), with the shape as given and strides by `layout`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(sizes: list[int]) -> Tensor:
        num_bytes = ITEMSIZES[dtype]
        for size in sizes:
            num_bytes *= size
        high = 2 if dtype == "bool" else 256
        data = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
        return data.view(getattr(torch, dtype)).reshape(sizes)

    if layout == "transposed" and shape:
        return draw(shape[::-1]).permute(*range(len(shape))[::-1])
    if layout == "every second" and shape:
        return draw([*shape[:-1], 2 * shape[-1]])[..., ::2]
    if layout == "expanded" and shape:
        return draw([1, *shape[1:]]).expand(shape)
    return draw(shape)


@pytest.fixture(scope="module", params=IMAGE_TRANSPORTS)
def settings_of_pool(request: pytest.FixtureRequest) -> SyncSettings:
    return replace(SMALL, transport=request.param)


@pytest.fixture(scope="module")
def engine(settings_of_pool: SyncSettings) -> ThreadEngine:
    """One for each transport."""
    del settings_of_pool
    return ThreadEngine("engine", {})


@pytest.fixture(scope="module")
def supervisor(engine: ThreadEngine, settings_of_pool: SyncSettings) -> Iterator[LocalSupervisor]:
    with local_pool([engine], settings_of_pool) as supervisor:
        yield supervisor


@pytest.fixture(autouse=True)
def freed(engine: ThreadEngine, supervisor: LocalSupervisor) -> Iterator[None]:
    """Frees with the test what engine and supervisor keep between syncs."""
    yield
    engine.unmap()
    supervisor.free_images()
    gc.collect()  # a view that is part of a cycle keeps the memory mapped


def publish(supervisor: LocalSupervisor, tensors: dict[str, Tensor], **options: Any) -> SyncReport:
    manifest = wire_manifest(tensors, **options)
    with closing(WeightPublisher(supervisor, tensors, manifest)) as publisher:
        return publisher.publish("pool", next_version(), timeout_s=20.0)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_tensors)
def test_any_layout_arrives_bit_for_bit(
    supervisor: LocalSupervisor,
    engine: ThreadEngine,
    drawn: list[tuple[str, list[int], str, str]],
) -> None:
    sources: dict[str, Tensor] = {}
    destinations: dict[str, Tensor] = {}
    for idx, (dtype, shape, source_layout, destination_layout) in enumerate(drawn):
        sources[f"t{idx}"] = random_tensor(dtype, shape, source_layout, seed=idx)
        if destination_layout == "expanded":
            destination_layout = "contiguous"  # nothing can be written through an expanded view
        destinations[f"t{idx}"] = random_tensor(dtype, shape, destination_layout, seed=100 + idx)
    engine.destinations = destinations

    report = publish(supervisor, sources, aliases={})

    for name, source in sources.items():
        assert raw_bytes(destinations[name]) == raw_bytes(source), name
    assert report.engines["engine"]["nbytes"] == sum(len(raw_bytes(t)) for t in sources.values())


def test_tied_tensors_travel_once_and_reach_every_name(
    supervisor: LocalSupervisor, engine: ThreadEngine
) -> None:
    embedding = torch.randn(50, 8)
    sources = {"embed": embedding, "head": embedding, "norm": torch.randn(8)}
    engine.destinations = empty_like(sources)

    report = publish(supervisor, sources)

    assert report.engines["engine"]["nbytes"] == 50 * 8 * 4 + 8 * 4
    assert torch.equal(engine.destinations["head"], embedding)
    assert torch.equal(engine.destinations["embed"], embedding)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("embed", "norm"), ("head", "norm")])
def test_an_engine_may_have_any_one_of_the_tied_names(
    supervisor: LocalSupervisor, engine: ThreadEngine, names: tuple[str, str]
) -> None:
    sources = {"embed": torch.randn(5, 8), "norm": torch.randn(8)}
    engine.destinations = {
        name: torch.empty(5, 8) if name != "norm" else torch.empty(8) for name in names
    }

    publish(supervisor, sources, aliases={"head": "embed"})

    assert torch.equal(engine.destinations[names[0]], sources["embed"])


def test_floats_are_cast_on_the_way_and_the_rest_is_not(
    supervisor: LocalSupervisor, engine: ThreadEngine
) -> None:
    sources = {
        "weight": torch.randn(300, 7),
        "transposed": torch.randn(7, 300).t(),
        "ids": torch.arange(70),
        "codes": torch.randn(9).to(torch.float8_e4m3fn),
        "choice of experts": torch.randn(8),
    }
    expected = {
        name: tensor.to(torch.bfloat16) if "weight transposed".count(name) else tensor
        for name, tensor in sources.items()
    }
    engine.destinations = empty_like(expected)

    publish(supervisor, sources, wire_dtype=torch.bfloat16, kept=["choice of experts"])

    for name, tensor in expected.items():
        assert raw_bytes(engine.destinations[name]) == raw_bytes(tensor), name


@pytest.mark.parametrize(
    ("destinations", "message"),
    [
        ({"a": torch.zeros(3)}, "not in the engine b"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "not sent c"),
        ({"a": torch.zeros(3), "b": torch.zeros(3)}, r"float32 \[2\].*float32 \[3\]"),
        ({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int32)}, "int32"),
    ],
)
def test_an_engine_with_another_model_is_refused(
    destinations: dict[str, Tensor], message: str
) -> None:
    engine = ThreadEngine("engine", destinations)
    sources = {"a": torch.ones(3), "b": torch.ones(2)}
    with (
        local_pool([engine], SMALL) as supervisor,
        pytest.raises(WeightSyncError, match=message),
    ):
        publish(supervisor, sources)

    assert all(not tensor.any() for tensor in destinations.values())


def test_corruption_after_the_copy_is_found(settings_of_pool: SyncSettings) -> None:
    sources = {"a": torch.randn(1000), "b": torch.randn(10)}
    broken, sound = (ThreadEngine(name, empty_like(sources)) for name in ("broken", "sound"))
    broken.corrupts_after_load = True
    with local_pool([broken, sound], settings_of_pool) as supervisor:
        report = publish(supervisor, sources)

    assert list(report.engines) == ["sound"]
    assert "corrupted on arrival: a bytes [0, 512)" in report.failed["broken"]
    assert broken.killed is not None
    assert sound.lifecycle.state == EngineState.SERVING


def test_a_version_that_is_corrupted_in_every_engine_waits_for_their_successors() -> None:
    sources = {"a": torch.randn(1000)}
    engine = ThreadEngine("engine", empty_like(sources))
    engine.corrupts_after_load = True
    with local_pool([engine], SMALL, require_engine=False) as supervisor:
        report = publish(supervisor, sources)

    assert not report.engines
    assert re.search(r"sent 0x.*arrived 0x", report.failed["engine"])
    assert engine.killed is not None
    assert supervisor.coordinator.version == report.version


def test_checksums_come_first_then_every_kth_time_and_for_new_engines() -> None:
    sources = {"a": torch.randn(1000)}
    engine = ThreadEngine("engine", empty_like(sources))
    have_checksums: list[bool] = []

    class Recorder(LocalSupervisor):
        def sync(self, message: Any) -> Any:
            answer = super().sync(message)
            if isinstance(answer, SyncGrant):
                have_checksums.append(answer.has_checksums)
            return answer

    every_third = SyncSettings(bucket_nbytes=512, verify_every=3)
    with local_pool([engine], every_third) as plain:
        recorder = Recorder(plain.loop, plain.coordinator)
        for idx in range(6):
            engine.incarnation = 1 if idx < 5 else 2
            publish(recorder, sources)

    assert have_checksums == [True, False, False, True, False, True]


def test_ranks_that_publish_different_models_are_found_out(
    settings_of_pool: SyncSettings,
) -> None:
    engine = ThreadEngine("engine", {"a": torch.zeros(1000)})
    with local_pool([engine], settings_of_pool) as supervisor:
        tensors = {"a": torch.randn(1000)}
        first = WeightPublisher(supervisor.as_rank(0, 2), tensors)
        second = WeightPublisher(supervisor.as_rank(1, 2), {"a": torch.randn(5000)})
        version = next_version()
        outcomes = in_threads(
            lambda: first.publish("pool", version, 10.0),
            lambda: second.publish("pool", version, 10.0),
        )
        first.close()
        second.close()

    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    assert any("their tensors differ" in str(outcome) for outcome in outcomes)


@pytest.mark.slow
def test_twenty_syncs_leave_no_descriptors_and_no_memory() -> None:
    sources = {"a": torch.randn(3_000_000), "b": torch.randn(1000, 77).t()}
    engine = ThreadEngine("engine", empty_like(sources))

    def settle(supervisor: LocalSupervisor) -> None:
        deadline = time.monotonic() + 5.0
        while supervisor.coordinator.is_syncing and time.monotonic() < deadline:
            time.sleep(0.01)

    def usage() -> tuple[int, int, int]:
        gc.collect()  # earlier tests' mappings, held by tracebacks
        with open("/proc/self/status", encoding="ascii") as status:
            fields = dict(line.split(":", 1) for line in status)
        rss_kb, shmem_kb = (int(fields[key].split()[0]) for key in ("VmRSS", "RssShmem"))
        return len(os.listdir("/proc/self/fd")), rss_kb, shmem_kb

    before = usage()
    with local_pool([engine], SyncSettings(bucket_nbytes=4 << 20)) as supervisor:
        publish(supervisor, sources)
        settle(supervisor)
        after_first = usage()
        for _ in range(20):
            publish(supervisor, sources)
        settle(supervisor)
        after_last = usage()
    engine.unmap()  # what an engine keeps mapped between syncs is its own
    at_end = usage()

    assert after_last[0] == after_first[0]
    assert after_last[1] < after_first[1] + 8_000
    assert after_last[2] <= after_first[2]
    assert at_end[0] <= before[0]
    assert at_end[2] <= before[2]
