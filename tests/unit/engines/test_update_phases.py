"""The phases of an adapter's update: the same with every transport."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Collector, collect, on_the_engines_loop, running, wire_request
from local_sync import publish
from scripted_core import ScriptedCore
from torch import Tensor

from umbra.engines.loading.weight_source import image_tensors
from umbra.engines.loading.worker_updates import WorkerMemory
from umbra.engines.shell.adapter_engine import AdapterEngine
from umbra.runtime.errors import EngineError, WeightSyncError
from umbra.runtime.process.host_memory import map_memory
from umbra.runtime.weights.image.fd_server import received_fd, serve_fds
from umbra.runtime.weights.image.image_memory import ImageMemory, numbered
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.manifest import BucketGrid, Manifest

NO_TENSORS = Manifest.layout([]).to_wire()
WEIGHTS = {"a": torch.randn(300), "b": torch.randn(7, 5)}
EXPORTS: dict[str, Any] = {
    "exports": [],
    "fd_socket": "",
    "progress": {},
    "has_checksums": True,
    "is_staged": False,
}


def engine_over(core: ScriptedCore) -> AdapterEngine:
    return AdapterEngine(core, max_num_seqs=4, max_context_len=64, tick_ms=1.0, load_weights=False)


@on_the_engines_loop
async def test_the_model_is_loaded_from_shared_memory_before_anything_is_verified(
    tmp_path: Path,
) -> None:
    core = ScriptedCore()
    done_before: list[str] = []

    def look(regions: list[list[int | None]]) -> None:  # before they are verified
        done_before.extend(core.done)

    async with engine_over(core) as engine:
        core.done.clear()
        outcome = await publish(engine, WEIGHTS, 1, tmp_path, tamper=look)

    assert outcome.mismatches == []
    assert done_before == ["pause", "load"]
    assert core.done.count("load") == 1


@on_the_engines_loop
async def test_the_model_is_loaded_from_exports_before_anything_is_verified() -> None:
    manifest = Manifest.layout([("a", "uint8", (1200,)), ("b", "uint8", (140,))]).to_wire()
    regions = [[0, 1200, 7], [1280, 140, 8]]

    core = ScriptedCore()
    core.regions = regions
    async with engine_over(core) as engine:
        await engine.prepare_update(1, manifest, EXPORTS)
        await engine.pause("abort")
        core.done.clear()
        loaded = await engine.load()
        assert (loaded, core.done) == ({"nbytes": 1340}, ["load"])

        assert await engine.verify_update(regions) == []
        assert core.done == ["load"]
        await engine.commit_update()

        await engine.prepare_update(2, NO_TENSORS, EXPORTS)
        await engine.load()
        assert len(await engine.verify_update([[0, 1200, 9]])) == 1
        with pytest.raises(EngineError, match="differ from those that were sent"):
            await engine.commit_update()

        await engine.abort_update()
        await engine.prepare_update(3, manifest, EXPORTS)
        await engine.load()
        with pytest.raises(ValueError, match="unpack"):
            await engine.verify_update([[1]])
        with pytest.raises(EngineError, match="differ from those that were sent"):
            await engine.commit_update()


@on_the_engines_loop
async def test_requests_that_wait_when_weights_come_are_aborted() -> None:
    """Their prompts may be cached under the older weights."""
    core = ScriptedCore()
    async with running(engine := engine_over(core)):
        await serving_one(engine)
        core.tokens_come.clear()
        await engine.submit([wire_request(1, [1, 2]), wire_request(2, [1, 2])])
        await engine.prepare_update(2, NO_TENSORS, EXPORTS)
        await engine.pause("keep")
        core.done.clear()

        await engine.load()

        assert core.done == ["abort 2", "load"]


class StagingCore(ScriptedCore):
    """Its worker reads until `has_read` is set, or the update is left."""

    obeys_while_generating = True

    def __init__(self) -> None:
        super().__init__()
        self.has_read = asyncio.Event()
        self.has_read.set()
        self.has_opened = asyncio.Event()

    async def ask_workers(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        (report,) = await super().ask_workers(order)
        if order["action"] == "open":
            self.has_opened.set()
        is_staged = self.has_read.is_set() or self.done[-1] == "close"
        return [{**report, "is_staged": is_staged}]


async def serving_one(engine: AdapterEngine) -> None:
    """Brings it to version 1."""
    await engine.prepare_update(1, NO_TENSORS, EXPORTS)
    await engine.load()
    await engine.commit_update()


@on_the_engines_loop
async def test_an_engine_takes_requests_while_an_update_is_staged() -> None:
    core = StagingCore()
    async with running(engine := engine_over(core)):
        await serving_one(engine)
        core.has_read.clear()
        core.has_opened.clear()
        async with asyncio.TaskGroup() as tasks:
            beginning = tasks.create_task(engine.prepare_update(2, NO_TENSORS, EXPORTS))
            await core.has_opened.wait()
            await engine.submit([wire_request(1, [1, 2], max_new_tokens=2)])
            collector = Collector()
            await collect(engine, collector, 1)
            assert not beginning.done()
            core.has_read.set()

        assert len(collector[1].tokens) == 2
        await engine.pause("abort")
        await engine.load()


@on_the_engines_loop
async def test_an_update_that_is_being_staged_can_be_left() -> None:
    core = StagingCore()
    async with running(engine := engine_over(core)):
        await serving_one(engine)
        core.has_read.clear()
        core.has_opened.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.prepare_update(2, NO_TENSORS, EXPORTS))
            await core.has_opened.wait()
            await engine.abort_update()

        assert (await engine.stats())["version"] == 1
        with pytest.raises(WeightSyncError, match="no update is in progress"):
            await engine.load()


@on_the_engines_loop
async def test_an_update_that_waits_to_be_loaded_cannot_be_committed() -> None:
    """The version before it was loaded, and this one was not."""
    core = ScriptedCore()
    async with running(engine := engine_over(core)):
        await serving_one(engine)
        await engine.prepare_update(2, NO_TENSORS, EXPORTS)
        core.may_go_on.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.probe_import([]))  # what is loaded waits for it
            await asyncio.sleep(0)
            tasks.create_task(engine.load())
            await asyncio.sleep(0)
            with pytest.raises(WeightSyncError, match="no update is in progress"):
                await engine.commit_update()
            core.may_go_on.set()


@on_the_engines_loop
async def test_workers_close_all_memory_when_an_update_is_aborted_or_ranks_may_have_ended(
    tmp_path: Path,
) -> None:
    core = ScriptedCore()
    async with engine_over(core) as engine:
        await publish(engine, WEIGHTS, 1, tmp_path)
        await engine.pause("abort")
        await engine.sleep(2)
        assert "close" not in core.done
        await engine.wake(["weights", "kv_cache"])
        await engine.abort_update()  # as warm engines are brought to rest
        assert core.done[-1] == "close"
        core.done.clear()

        await engine.prepare_update(2, NO_TENSORS, EXPORTS)
        await engine.load()
        await engine.commit_update()
        await engine.sleep(2)
        assert "close" not in core.done
        await engine.abort_update()
        assert core.done[-1] == "close"

        await engine.abort_update()
        assert core.done.count("close") == 1


@asynccontextmanager
async def node_image(
    manifest: Manifest, folder: Path, bucket_nbytes: int
) -> AsyncGenerator[tuple[dict[str, Any], SyncProgress]]:
    """What a worker gets of an image that nobody has filled yet."""
    async with serve_fds(str(folder / "fds")) as server:
        owner = ImageMemory("pool", server)
        async with opened(owner, manifest, bucket_nbytes) as sync:
            yield sync
        owner.close()


@asynccontextmanager
async def opened(
    owner: ImageMemory, manifest: Manifest, bucket_nbytes: int
) -> AsyncGenerator[tuple[dict[str, Any], SyncProgress]]:
    grid = BucketGrid(manifest.nbytes, bucket_nbytes)
    async with owner.opened(grid, 1, 1) as (details, progress):
        own = numbered(details, 1)[0]
        own = {**own, "progress": own["progress"] | {"timeout_s": 10.0}}
        yield {**own, "manifest": manifest.to_wire(), "bucket_nbytes": bucket_nbytes}, progress


def filled(description: dict[str, Any], manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of the image, to be written to."""
    wire = description["image"]
    with received_fd(description["fd_socket"], wire["name"], 5.0) as fd:
        return image_tensors(manifest, map_memory(fd, wire["nbytes"]))


def test_a_worker_stops_loading_an_image_whose_sync_is_aborted(tmp_path: Path) -> None:
    manifest = Manifest.layout([("a", "float32", (3,)), ("b", "float32", (2,))])

    def read(description: dict[str, Any], progress: SyncProgress) -> None:
        with ExitStack() as opened:
            source = opened.enter_context(WorkerMemory().reading(description, torch.device("cpu")))
            tensors = source.tensors()
            assert next(tensors)[0] == "a"
            progress.abort()
            with pytest.raises(WeightSyncError, match="aborted before the model was loaded"):
                next(tensors)
            with pytest.raises(WeightSyncError, match="aborted before the model was loaded"):
                opened.close()
        assert progress.num_loaded(0) == 0

    async def body() -> None:
        async with node_image(manifest, tmp_path, 512) as (description, progress):
            progress.set_filled(0, 1)
            await asyncio.to_thread(read, description, progress)

    asyncio.run(body())


def test_a_worker_reads_an_entry_when_its_pages_are_filled_and_counts_when_it_has_copied(
    tmp_path: Path,
) -> None:
    manifest = Manifest.layout([(name, "float32", (1024,)) for name in "abc"])  # a page each
    memory = WorkerMemory()

    def read(description: dict[str, Any], progress: SyncProgress, value: float) -> None:
        ranks = filled(description, manifest)
        with memory.reading(description, torch.device("cpu")) as source:
            assert source.memory is not None
            seen.append(source.memory)
            with source.reading([]):
                for idx, name in enumerate("abc"):
                    assert progress.num_loaded(0) == max(0, 8 * (idx - 1))
                    ranks[name].fill_(value + idx)
                    progress.set_filled(0, 8 * (idx + 1))
                    source.wait(idx)
                    assert torch.equal(source.block(idx, 0), torch.full((1024,), value + idx))
        assert progress.num_loaded(0) == 24

    async def body() -> None:
        async with serve_fds(str(tmp_path / "fds")) as server:
            owner = ImageMemory("pool", server)
            for version in range(2):
                async with opened(owner, manifest, 512) as (description, progress):
                    await asyncio.to_thread(read, description, progress, 10.0 * version)
            owner.close()

    seen: list[object] = []
    asyncio.run(body())
    memory.close()

    assert seen[0] is seen[1]  # so that prepared copies are used again


def test_a_loader_that_writes_to_a_tensor_still_sees_what_comes_later(tmp_path: Path) -> None:
    manifest = Manifest.layout([("a", "float32", (3,)), ("b", "float32", (3,))])  # on one page

    def read(description: dict[str, Any], progress: SyncProgress) -> None:
        ranks = filled(description, manifest)
        ranks["a"].fill_(1.0)
        later = threading.Timer(0.1, fill_the_rest, (ranks, progress))
        later.start()
        progress.set_filled(0, 1)
        with WorkerMemory().reading(description, torch.device("cpu")) as source:
            for _, tensor in source.tensors():
                loaded.append(tensor.add_(1.0).clone())
        later.join()
        assert torch.equal(ranks["a"], torch.ones(3))

    def fill_the_rest(ranks: dict[str, Tensor], progress: SyncProgress) -> None:
        ranks["b"].fill_(2.0)
        progress.set_filled(0, 2)

    async def body() -> None:
        async with node_image(manifest, tmp_path, 256) as (description, progress):
            await asyncio.to_thread(read, description, progress)

    loaded: list[Tensor] = []
    asyncio.run(body())

    assert torch.equal(torch.cat(loaded), torch.tensor([2.0] * 3 + [3.0] * 3))


def test_what_a_loader_writes_to_its_tensors_is_not_in_the_image(tmp_path: Path) -> None:
    manifest = Manifest.layout([("a", "float32", (3,))])
    path = tmp_path / "image"
    path.write_bytes(bytes(4096))
    description = {"path": str(path), "nbytes": 4096, "manifest": manifest.to_wire()}

    with WorkerMemory().reading(description, torch.device("cpu")) as source:
        dict(source.tensors())["a"].add_(1.0)

    assert path.read_bytes() == bytes(4096)
