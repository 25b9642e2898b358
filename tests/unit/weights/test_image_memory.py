"""How long the image of a node lives, and who gets which."""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path

import pytest
from async_tests import on_a_loop

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.image.image_memory import ImageMemory
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.manifest import BucketGrid

GRID = BucketGrid(2 * mmap.PAGESIZE, mmap.PAGESIZE)


def names_of_images(folder: Path, *syncs: tuple[BucketGrid, int]) -> list[str]:
    """Of syncs of one pool, in each of which one rank fills a number of buckets."""

    async def body() -> list[str]:
        names: list[str] = []
        async with serve_fds(str(folder / "fds")) as server:
            memory = ImageMemory("pool", server)
            for grid, num_filled in syncs:
                async with memory.opened(grid, 1, 1) as (details, progress):
                    assert details["image"]["nbytes"] == grid.image_nbytes
                    progress.set_filled(0, num_filled)
                    names.append(details["image"]["name"])
            memory.close()
        return names

    return asyncio.run(body())


def test_an_image_is_kept_from_one_sync_to_the_next(tmp_path: Path) -> None:
    first, second = names_of_images(tmp_path, (GRID, 2), (GRID, 2))

    assert first == second


def test_an_image_that_was_not_filled_is_not_used_again(tmp_path: Path) -> None:
    """A rank that was cut off may still be writing to it."""
    first, second = names_of_images(tmp_path, (GRID, 1), (GRID, 2))

    assert first != second


def test_weights_of_another_size_have_another_image(tmp_path: Path) -> None:
    larger = BucketGrid(3 * mmap.PAGESIZE, mmap.PAGESIZE)

    first, second = names_of_images(tmp_path, (GRID, 2), (larger, 3))

    assert first != second


def test_an_image_holds_what_filled_it_to_the_end_last(tmp_path: Path) -> None:
    larger = BucketGrid(3 * mmap.PAGESIZE, mmap.PAGESIZE)

    async def body() -> list[str]:
        held: list[str] = []
        async with serve_fds(str(tmp_path / "fds")) as server:
            memory = ImageMemory("pool", server)
            for grid, contents, num_filled in (
                (GRID, "a", 2),
                (GRID, "b", 1),  # it is not filled
                (GRID, "c", 2),
                (GRID, "", 2),
                (GRID, "d", 2),
                (larger, "e", 3),
                (larger, "f", 3),
            ):
                async with memory.opened(grid, 1, 1, contents) as (details, progress):
                    progress.set_filled(0, num_filled)
                    held.append(details["holds"])
            memory.close()
            async with memory.opened(larger, 1, 1, "g") as (details, _):
                held.append(details["holds"])
        return held

    assert asyncio.run(body()) == ["", "a", "", "c", "", "", "e", ""]


@on_a_loop
async def test_pages_are_given_back_although_a_process_has_them_mapped(tmp_path: Path) -> None:
    async with serve_fds(str(tmp_path / "fds")) as server:
        memory, kept = ImageMemory("pool", server), KeptImage()
        async with memory.opened(GRID, 1, 1) as (details, progress):
            image = await asyncio.to_thread(kept.receive, details, 5.0)
            image.memory[:1] = b"1"
            progress.set_filled(0, GRID.num_buckets)
        assert image.memory[:1] == b"1"

        await memory.free()

        assert image.memory[:1] == b"\0"
        with pytest.raises(WeightSyncError, match="no descriptor of that name"):
            await asyncio.to_thread(KeptImage().receive, details, 5.0)
        kept.close()
