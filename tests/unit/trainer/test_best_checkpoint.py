"""The link to the best checkpoint, refused paths and bases, and the digests of files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import ConfigError
from umbra.trainer.checkpoint.file_digests import DigestingFileSystem, complete, find_damage
from umbra.trainer.checkpoint.run_dir import check_base
from umbra.trainer.checkpoint.trainer_state import (
    COMPLETE,
    STATE_FILE,
    BestCheckpoint,
    TrainerState,
    best_checkpoint,
    read_trainer_state,
)
from umbra.trainer.world.run_files import RunDirectoryError

ROWS = [
    {"step": step, "eval/accuracy": accuracy, "eval/reward_mean": -accuracy}
    for step, accuracy in ((0, 0.9), (10, 0.5), (20, 0.7), (30, 0.6))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of steps 10 to 40, the last of which is incomplete."""
    for step in (10, 20, 30, 40):
        path = tmp_path / f"step-{step:06d}"
        path.mkdir()
        state = TrainerState(step=step, version=step, world_size=1, seed=0)
        (path / STATE_FILE).write_text(json.dumps(asdict(state)))
        if step < 40:
            (path / COMPLETE).touch()
    return tmp_path


def feed(best: BestCheckpoint, folder: Path, first: int = 0) -> list[int]:
    """Reports the evaluations from step `first` on; returns those that were the best."""
    return [
        int(row["step"])
        for row in (*ROWS, {"step": 40, "eval/accuracy": 1.0, "eval/reward_mean": 1.0})
        if row["step"] >= first and best.evaluated(folder / f"step-{row['step']:06d}", row)
    ]


def test_the_link_follows_the_best_complete_checkpoint(folder: Path) -> None:
    best = BestCheckpoint(folder, "accuracy", [], 0)

    assert best_checkpoint(folder) is None
    assert feed(best, folder) == [10, 20]
    assert best_checkpoint(folder) == folder / "step-000020"
    assert (folder / "best").resolve() == folder / "step-000020"


def test_rewards_may_decide(folder: Path) -> None:
    best = BestCheckpoint(folder, "reward", [], 0)

    assert feed(best, folder) == [10]


def test_a_resumed_run_knows_the_best_score_so_far(folder: Path) -> None:
    feed(BestCheckpoint(folder, "accuracy", [], 0), folder)

    best = BestCheckpoint(folder, "accuracy", ROWS, 30)

    assert feed(best, folder, first=30) == []
    assert best_checkpoint(folder) == folder / "step-000020"


def test_a_best_checkpoint_of_a_discarded_history_does_not_count(folder: Path) -> None:
    feed(BestCheckpoint(folder, "accuracy", [], 0), folder)

    best = BestCheckpoint(folder, "accuracy", ROWS[:2], 10)

    assert best_checkpoint(folder) is None
    assert feed(best, folder, first=30) == [30]


def test_the_link_follows_a_run_directory_that_is_moved(tmp_path: Path, folder: Path) -> None:
    best = BestCheckpoint(folder, "accuracy", [], 0)
    moved = folder.rename(tmp_path.with_name("moved"))

    assert feed(best, moved) == [10, 20]
    assert best_checkpoint(moved) == moved / "step-000020"


def test_a_link_whose_checkpoint_is_gone_does_not_count(folder: Path) -> None:
    feed(BestCheckpoint(folder, "accuracy", [], 0), folder)
    (folder / "step-000020" / COMPLETE).unlink()

    BestCheckpoint(folder, "accuracy", ROWS, 30)

    assert best_checkpoint(folder) is None


NAMES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "trainer.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of two shards, which are digested while they are written, and two other files."""
    files = DigestingFileSystem()
    for name in NAMES[:2]:
        with files.create_stream(tmp_path / name, "wb") as stream:
            writer: Any = stream
            for part in (b"some ", b"", memoryview(b"bytes of "), name.encode() * 100_000):
                writer.write(part)
    for name in NAMES[2:]:
        (tmp_path / name).write_bytes(name.encode())
    complete(tmp_path, files.digests)
    assert set(files.digests) == set(NAMES[:2])
    return tmp_path


def test_what_is_as_it_was_written_is_intact(checkpoint: Path) -> None:
    assert find_damage(checkpoint) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_noticed_by_the_one_that_reads_the_file(
    checkpoint: Path, name: str
) -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[len(data) // 2] ^= 4
    (checkpoint / name).write_bytes(data)

    found = [find_damage(checkpoint, part, 3) for part in range(3)]

    assert find_damage(checkpoint).startswith(f"{name} changed since it was written: its digest is")
    assert [text.partition(" ")[0] for text in found if text] == [name]


def test_a_file_that_is_missing_is_named(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()

    assert find_damage(checkpoint) == ".metadata cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("content", "number"), [("", 0), ('{"format": 2, "digests": {}}', 2), ('{"format": 99}', 99)]
)
def test_another_format_is_no_damage(checkpoint: Path, content: str, number: int) -> None:
    (checkpoint / "COMPLETE").write_text(content)

    with pytest.raises(
        ConfigError,
        match=rf"{checkpoint} has format {number}, and this version of umbra reads format 1: use",
    ):
        find_damage(checkpoint)


@pytest.mark.parametrize("content", ["{}", "[]", '{"digests": [1]}', "{"])
def test_digests_that_cannot_be_read_are_damage(checkpoint: Path, content: str) -> None:
    (checkpoint / "COMPLETE").write_text(content)

    assert find_damage(checkpoint).startswith("COMPLETE does not have the digests of its files")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("run/checkpoints/step-60", "does not exist"),
        ("run/checkpoints/step-000003", "is incomplete: its save was interrupted"),
        ("run/checkpoints", "is not a checkpoint"),
        ("run", "is not a checkpoint"),
    ],
)
def test_a_refused_path_names_a_checkpoint_near_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, what: str
) -> None:
    folder = tmp_path / "run/checkpoints"
    for step in (1, 2, 3):
        (folder / f"step-{step:06d}").mkdir(parents=True)
    for step in (2, 1):
        (folder / f"step-{step:06d}" / COMPLETE).touch()
    path = tmp_path / given
    remedy = f"name one of the folders in {folder}, such as step-000002"
    expected = f"checkpoint {path} {what}: {remedy}"

    with pytest.raises(ConfigError) as refused:
        read_trainer_state(path)
    status = main(["export", str(path), str(tmp_path / "out")])

    assert str(refused.value) == expected
    assert (status, capsys.readouterr().err) == (2, f"umbra: {expected}\n")


def test_a_checkpoint_that_cannot_be_read_advises_no_setting_of_the_run(tmp_path: Path) -> None:
    (tmp_path / COMPLETE).touch()
    (tmp_path / STATE_FILE).mkdir()

    with pytest.raises(RunDirectoryError) as refused:
        read_trainer_state(tmp_path)

    cause = "a folder of that name is in the way: move that folder away"
    assert str(refused.value) == f"cannot read trainer.json of the checkpoint {tmp_path}: {cause}"


def test_adapters_of_another_model_name_the_one_that_their_run_has_recorded(
    tmp_path: Path,
) -> None:
    bases = [tmp_path / "work/base", tmp_path / "other"]
    for value, base in enumerate(bases):
        base.mkdir(parents=True)
        save_file({"weight": np.full(4, value, np.float32)}, base / "model.safetensors")
    of_run, other = (WeightFiles(base).digest() for base in bases)
    model = {"path": "base", "lora": {"rank": 2}}
    (tmp_path / "run").mkdir()
    recorded = {"folder": str(tmp_path / "work"), "settings": {"model": model}}
    (tmp_path / "run/settings.json").write_text(json.dumps(recorded))
    checkpoint = tmp_path / "run/checkpoints/step-000001"
    state = TrainerState(step=1, version=1, world_size=1, seed=0, base=of_run)

    check_base(checkpoint, state, of_run)
    with pytest.raises(
        ConfigError, match=rf"in model\.path: append model.path={bases[0]}, or leave out --model"
    ):
        check_base(checkpoint, state, other)
    (bases[0] / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"in model\.path: name the model"):
        check_base(checkpoint, state, other)
