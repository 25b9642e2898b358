"""The program of the ranks in `test_background_saves`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import numpy as np
from rank_programs import (
    TRAIN,
    full_moments,
    full_parameters,
    make_policy,
    make_train_step,
    make_world,
    rank_batch,
    said_by,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from umbra.trainer.checkpoint import host_copy
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.trainer_state import TrainerState, is_complete
from umbra.trainer.model.train_model import POLICY
from umbra.trainer.world.mesh import Mesh, any_rank, barrier, from_lead


def run_saves(folder: str) -> dict[str, Any]:
    world = make_world()
    return {
        "beside": train_beside_a_save(world, f"{folder}/beside"),
        "short": save_without_memory(world, f"{folder}/short"),
        "failed": fail_in_the_background(world, f"{folder}/failed"),
        "moved": save_elsewhere(world, Path(folder) / "run", Path(folder) / "moved"),
        "removed": save_elsewhere(world, Path(folder) / "gone", None),
    }


def state_of(world: Mesh, step: int) -> TrainerState:
    return TrainerState(step=step, version=step, world_size=world.world_size, seed=0)


@contextmanager
def held_writers() -> Generator[tuple[threading.Event, threading.Event]]:
    """Writers set the first event before their first byte, and go on once the second is set."""
    begun, released = threading.Event(), threading.Event()
    write = FileSystemWriter.write_data

    def held(self: FileSystemWriter, *args: Any) -> Any:
        begun.set()
        assert released.wait(60.0)
        return write(self, *args)

    with patch.object(FileSystemWriter, "write_data", held):
        yield begun, released


def train_beside_a_save(world: Mesh, folder: str) -> dict[str, Any]:
    """Trains a step while a checkpoint is held before its first byte, and then loads it."""
    policy = make_policy(world)
    train_step = make_train_step(world, policy, TRAIN)
    train_step.run(rank_batch(world, 0, 1), 0)
    store = CheckpointStore(Path(folder), world, keep=2)
    done: list[bool] = []
    with held_writers() as (_, released):
        saved = full_parameters(policy) | full_moments(policy)
        path = store.save(
            state_of(world, 1),
            {POLICY: policy},
            lambda: done.append(is_complete(store.path(1))),
            in_background=True,
        )
        began = [is_complete(path), bool(done)]
        train_step.run(rank_batch(world, 1, 1), 1)
        trained = full_parameters(policy) | full_moments(policy)
        released.set()
        store.save(state_of(world, 2), {POLICY: policy}, in_background=True)
        done.append(is_complete(path))
    store.finish()
    loaded: list[dict[str, Any]] = []
    for step in (1, 2):
        store.load(store.path(step), {POLICY: policy})
        loaded.append(full_parameters(policy) | full_moments(policy))
    return {
        "began": began,
        "done": done,
        "saved": differing(saved, loaded[0]),
        "trained": differing(trained, loaded[1]),
        "changed": differing(saved, trained),
    }


def differing(some: dict[str, Any], others: dict[str, Any]) -> list[str]:
    return [name for name, values in some.items() if not np.array_equal(values, others[name])]


def save_elsewhere(world: Mesh, run_dir: Path, moved: Path | None) -> dict[str, Any]:
    """A checkpoint whose run directory is moved before its first byte, or removed."""
    from_lead(world, run_dir.mkdir)
    policy, kept = make_policy(world), list[list[int]]()
    store = CheckpointStore(run_dir / "checkpoints", world, keep=1)
    store.save(state_of(world, 1), {POLICY: policy})
    with held_writers() as (begun, released):
        store.save(
            state_of(world, 2),
            {POLICY: policy},
            lambda: kept.append(store.steps()),
            in_background=True,
        )
        assert begun.wait(60.0)
        barrier()
        from_lead(world, lambda: run_dir.rename(moved) if moved else rmtree(run_dir))
        released.set()
        said = said_by(store.finish)
    is_back = run_dir.exists()
    return {"said": said, "folder": str(store.folder), "kept": kept, "is_back": is_back}


def save_without_memory(world: Mesh, folder: str) -> list[bool]:
    """Whether each of two checkpoints was complete when `save` returned."""
    policy, complete = make_policy(world), list[bool]()
    store = CheckpointStore(Path(folder), world, keep=2)
    for step, free_nbytes in ((1, 1000.0 if world.rank else 1e12), (2, 1e12)):
        with patch.object(host_copy, "free_nbytes", return_value=free_nbytes):
            path = store.save(state_of(world, step), {POLICY: policy}, in_background=True)
        complete.append(is_complete(path))
    return complete


def fail_in_the_background(world: Mesh, folder: str) -> dict[str, Any]:
    """A checkpoint that rank 1 cannot write, behind one that it could."""
    policy = make_policy(world)
    store = CheckpointStore(Path(folder), world, keep=2)
    store.save(state_of(world, 1), {POLICY: policy})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    effect = full if world.rank == 1 else FileSystemWriter.write_data
    done: list[bool] = []
    with patch.object(FileSystemWriter, "write_data", autospec=True, side_effect=effect):
        store.save(
            state_of(world, 2), {POLICY: policy}, lambda: done.append(True), in_background=True
        )
        while not any_rank(store.has_failed):  # at once, if the test does not time out
            pass
    said = said_by(store.finish)
    barrier()  # rank 0 removes what was written
    left = sorted(path.name for path in Path(folder).iterdir())
    return {"said": said, "left": left, "done": done, "failed": store.has_failed}
