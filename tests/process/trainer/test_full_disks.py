"""Full disks: each writer reports the free space, and leaves earlier files unchanged."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_programs import leave_room, run_all
from training_models import save_model

from umbra.runtime.disk import format_nbytes
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.trainer.checkpoint.run_dir import VersionCounter
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.reporting import metrics_plot
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.metrics_loggers import (
    LoggedRun,
    MetricsLog,
    MetricsLogger,
    TensorboardLogger,
    read_metrics,
)
from umbra.trainer.reporting.run_reporter import RunReporter, finish
from umbra.trainer.world.run_files import RunDirectoryError, check_writable, write_text, writing

event_file_loader: Any = importlib.import_module(
    "tensorboard.backend.event_processing.event_file_loader"
)
MountDisk = Callable[[str], Path]
ROW = {"rollout/reward_mean": 0.5, "train/loss": -0.01}


def is_full(disk: Path, free: str = "0 bytes") -> str:
    """A pattern of the error."""
    return rf"the disk is full \({free} free on {disk}\): free some space"


@pytest.mark.process
@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_names_what_it_needs_and_leaves_the_earlier_one(
    mount_disk: MountDisk, umbra_distributed_world: DistributedWorld
) -> None:
    disk = mount_disk("size=8m")

    one, other = umbra_distributed_world(
        run_all, {"saved": ["save_as_the_disk_fills_up", str(disk)]}, num_ranks=2, timeout_s=120.0
    )

    assert one == other, "every rank says the same"
    (first, files), *failed, (last, last_files) = one["saved"]
    assert (first, last) == ("", "")
    assert "step-000001/COMPLETE" in files
    for said, left in failed:
        assert left == files
        sizes = r"needs about \d+\.\d KiB, (\d+\.\d KiB|0 bytes) free on "
        assert re.match(
            r"RunDirectoryError: cannot write the checkpoint .*/step-000002: "
            rf"the disk is full \({sizes}{disk}\): free some space, lower train.keep_checkpoints",
            said,
        ), said
    assert {name.partition("/")[0] for name in last_files} == {"step-000002"}


@pytest.mark.process
@pytest.mark.slow
def test_an_export_that_does_not_fit_names_what_it_needs_and_leaves_the_earlier_one(
    mount_disk: MountDisk, umbra_distributed_world: DistributedWorld, tmp_path: Path
) -> None:
    disk = mount_disk("size=4m")
    nbytes = (save_model(tmp_path / "model") / "model.safetensors").stat().st_size
    left = [1 << 20, nbytes // 2, nbytes + 4096, 0]  # the third is too little for config.json, too
    (disk / ".export.new").mkdir()
    (disk / ".export.new" / "of a killed one").write_bytes(bytes(10_000))

    (ran,) = umbra_distributed_world(
        run_all,
        {"said": ["export_onto", str(tmp_path / "model"), str(disk), left]},
        num_ranks=1,
        timeout_s=120.0,
    )

    assert ran["said"][0] == ""
    for said in ran["said"][1:]:
        assert re.match(
            rf"RunDirectoryError: cannot export the model to {disk}/export: the disk is full "
            rf"\(needs about \d+\.\d KiB, .* free on {disk}\): free some space",
            said,
        ), said
    assert {path.name for path in disk.iterdir()} == {"export", "junk"}
    assert (disk / "export" / "model.safetensors").stat().st_size == nbytes


def write_until_full(log: MetricsLogger | MetricsLog, disk: Path) -> None:
    log.write(1, ROW)
    leave_room(disk / "junk", 0)
    for step in range(2, 1000):
        log.write(step, ROW)


def test_metrics_name_their_file(mount_disk: MountDisk) -> None:
    disk = mount_disk("size=1m")

    with (
        pytest.raises(RunDirectoryError, match=rf"{disk}/metrics.jsonl: {is_full(disk)}"),
        MetricsLog(disk, first_step=1) as log,
    ):
        write_until_full(log, disk)

    assert read_metrics(disk / "metrics.jsonl")[0]["step"] == 1


def test_events_name_their_folder_and_fail_at_once(mount_disk: MountDisk, tmp_path: Path) -> None:
    disk = mount_disk("size=1m")
    (tmp_path / "tensorboard").symlink_to(disk)
    log = TensorboardLogger(LoggedRun(folder=tmp_path, name="run", settings={}, first_step=1))

    with pytest.raises(RunDirectoryError, match=rf"tensorboard: {is_full(disk)}"):
        write_until_full(log, disk)
    log.close(failed=True)

    (events,) = disk.glob("events*")
    seen = [event.step for event in event_file_loader.EventFileLoader(str(events)).Load()]
    # A version and the start, then each step up to the one that did not fit.
    assert seen == [0, 1, *range(1, len(seen) - 1)]


def test_whatever_else_is_written_names_its_file(mount_disk: MountDisk, tmp_path: Path) -> None:
    disk = mount_disk("size=1m")
    write_text(disk / "metrics.jsonl", '{"step": 1, "rollout/reward_mean": 0.5}\n')
    write_text(disk / "kept.txt", "old")
    leave_room(disk / "junk", 0)
    config = check_config(
        TrainerConfig,
        {
            "run": {"dir": str(disk)},
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "reward": {"function": "r:f"},
            "train": {"steps": 4},
        },
        "config",
    )
    journal = RunReporter(config, ProgressDisplay(None), None)
    record = {"id": "a", "prompt": "a", "tokens": b"1234", "row": {"long": "x" * 10_000}}
    writers: dict[str, Callable[[], object]] = {
        "versions.jsonl": lambda: VersionCounter(disk / "versions.jsonl", 0, writes=True).next(1),
        "metrics.png": lambda: finish(config, journal, steps=1, engine_restarts=0, stopped_by=""),
        "summary.json": lambda: finish(
            config, journal, steps=1, engine_restarts=0, stopped_by="SIGTERM"
        ),
        "kept.txt": lambda: write_text(disk / "kept.txt", "new" * 10_000),
    }

    for name, write in writers.items():
        with pytest.raises(
            RunDirectoryError, match=rf"cannot write {disk}/{name}: {is_full(disk)}"
        ):
            write()
    with (
        pytest.raises(RunDirectoryError, match=f"cannot write {disk}/prompts: {is_full(disk)}"),
        writing("write", disk / "prompts"),
    ):
        write_prompts(disk / "prompts", [record])
    with pytest.raises(RunDirectoryError, match=f"cannot write to {disk}: {is_full(disk)}"):
        check_writable(disk)
    arguments = argparse.Namespace(run_dir=str(disk), output=str(disk / "drawn.svg"))
    with pytest.raises(ConfigError, match=rf"drawn.svg: {is_full(disk)}, or choose another name"):
        metrics_plot.run(arguments)
    assert (disk / "kept.txt").read_text() == "old"
    assert not [path for path in disk.iterdir() if path.name.startswith(".")]


def test_a_disk_without_inodes_is_named(mount_disk: MountDisk) -> None:
    disk = mount_disk("size=1m,nr_inodes=3")
    (disk / "a").touch()
    (disk / "b").touch()

    with pytest.raises(
        RunDirectoryError, match=rf"full \(only \d+ inodes free on {disk}: too many file"
    ):
        write_text(disk / "c", "x")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (2_040_109_466, "1.9 GiB")],
)
def test_sizes_are_shown_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
    assert format_nbytes(3 << 60) == "3145728.0 TiB"
