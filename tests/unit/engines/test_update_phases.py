"""The phases of an adapter's update: the same with every transport."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run_async
from local_sync import publish
from scripted_core import ScriptedCore

from umbra.engines.shell.adapter_engine import AdapterEngine
from umbra.engines.shell.weight_source import open_weights
from umbra.runtime.errors import EngineError, WeightSyncError
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.shared_memory.memfd import (
    create_memory,
    serve_fds,
)
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress

WEIGHTS = {"a": torch.randn(300), "b": torch.randn(7, 5)}
EXPORTS: dict[str, Any] = {
    "transport": "cuda_ipc",
    "exports": [],
    "fd_socket": "",
    "progress": {},
    "has_checksums": True,
}


def engine_over(core: ScriptedCore) -> AdapterEngine:
    return AdapterEngine(core, max_num_seqs=4, max_context_len=64, tick_ms=1.0, load_weights=False)


def test_the_model_is_loaded_from_shared_memory_before_anything_is_verified(
    tmp_path: Path,
) -> None:
    core = ScriptedCore()
    done_before: list[str] = []

    def look(regions: list[list[int | None]]) -> None:  # before they are verified
        done_before.extend(core.done)

    async def body() -> None:
        async with engine_over(core) as engine:
            core.done.clear()
            report = await publish(engine, WEIGHTS, 1, tmp_path, tamper=look)

        assert report["mismatches"] == []
        assert done_before == ["pause", "load_weights"]
        assert core.done.count("load_weights") == 1

    run_async(body)


def test_the_model_is_loaded_from_exports_before_anything_is_verified() -> None:
    regions: list[list[int | None]] = [[0, 1200, 7], [1280, 140, 8]]

    async def body() -> None:
        core = ScriptedCore()
        core.regions = regions
        async with engine_over(core) as engine:
            await engine.begin_update(1, b"", EXPORTS)
            core.done.clear()
            loaded = await engine.load()
            assert (loaded, core.done) == ({"nbytes": 1340}, ["load_weights"])
            with pytest.raises(EngineError, match="has not been verified"):
                await engine.commit_update()

            report = await engine.finish_update(regions)

            assert report == {"count": 2, "nbytes": 1340, "mismatches": []}
            assert core.done == ["load_weights"]
            await engine.commit_update()

    run_async(body)


def test_workers_close_the_ranks_memory_when_an_update_is_aborted_or_ranks_may_have_ended(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        core = ScriptedCore()
        async with engine_over(core) as engine:
            await publish(engine, WEIGHTS, 1, tmp_path)
            await engine.pause("abort")
            await engine.abort_update()  # as warm engines are brought to rest
            assert "close_exports" not in core.done

            await engine.begin_update(2, b"", EXPORTS)
            await engine.load()
            await engine.finish_update([])
            await engine.commit_update()
            await engine.sleep(2)
            assert "close_exports" not in core.done
            await engine.abort_update()
            assert core.done[-1] == "close_exports"

            await engine.abort_update()
            assert core.done.count("close_exports") == 1

    run_async(body)


def test_a_worker_stops_loading_an_image_whose_sync_is_aborted(tmp_path: Path) -> None:
    manifest = Manifest.layout([("a", "float32", (3,)), ("b", "float32", (2,))])
    image = create_memory("image", 4096)
    fd, progress = SyncProgress.create("progress", 1, 1)
    path = str(tmp_path / "fds")
    numbers = {"num_ranks": 1, "num_engines": 1, "engine": 0, "timeout_s": 10.0}
    description = {
        "path": f"/proc/self/fd/{image}",
        "nbytes": 4096,
        "manifest": manifest.to_wire(),
        "fd_socket": path,
        "progress": {"name": "progress"} | numbers,
    }

    def read() -> None:
        with open_weights(description, torch.device("cpu")) as source:
            tensors = source.tensors()
            assert next(tensors)[0] == "a"
            progress.abort()
            with pytest.raises(WeightSyncError, match="aborted before the model was loaded"):
                next(tensors)

    async def body() -> None:
        async with serve_fds(path, {"progress": fd}):
            await asyncio.to_thread(read)

    try:
        asyncio.run(body())
    finally:
        progress.close()
        os.close(fd)
        os.close(image)


def test_what_a_loader_writes_to_its_tensors_is_not_in_the_image(tmp_path: Path) -> None:
    manifest = Manifest.layout([("a", "float32", (3,))])
    path = tmp_path / "image"
    path.write_bytes(bytes(4096))
    description = {"path": str(path), "nbytes": 4096, "manifest": manifest.to_wire()}

    with open_weights(description, torch.device("cpu")) as source:
        dict(source.tensors())["a"].add_(1.0)

    assert path.read_bytes() == bytes(4096)
