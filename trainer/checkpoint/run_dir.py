"""The run directory: what is where, starting anew or going on, and the version counter.

run.dir/prompts.msgpack, eval_prompts.msgpack   tokenised data sets
run.dir/metrics.jsonl, tensorboard/             numbers of each step
run.dir/versions.jsonl                          weight versions and the steps they belong to
run.dir/resumed.json                            the newest version when a checkpoint was named
run.dir/checkpoints/                            see `umbra.trainer.checkpoint.checkpoint_store`
run.dir/ledger/                                 every sample's history; `umbra ledger` shows it
run.dir/export/                                 the trained model, Hugging Face format
run.dir/summary.json, report.html, metrics.png  at the end; `umbra plot` draws sooner
run.dir/logs/                                   output of every process umbra starts
run.dir/replaced/                               all that but data and logs of the run that is being
                                                replaced, until the new one has done a step
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from umbra.runtime.errors import ConfigError
from umbra.trainer.checkpoint.trainer_state import complete_checkpoints, read_trainer_state
from umbra.trainer.config.trainer_config import RunSection
from umbra.trainer.run_files import (
    check_writable,
    remove,
    restore_folder,
    write_json,
    writing,
)

_EARLIER: Final = (
    "metrics.jsonl",
    "tensorboard",
    "wandb",
    "versions.jsonl",
    "resumed.json",
    "checkpoints",
    "ledger",
    "export",
    "summary.json",
    "report.html",
    "metrics.png",
)
_REPLACED: Final = "replaced"
# A run that is gone on with from its very beginning: what was generated need not be done again.
_KEPT_WITHOUT_CHECKPOINT: Final = ("ledger", "versions.jsonl")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def versions(self) -> Path:
        return self.path / "versions.jsonl"

    @property
    def resumed(self) -> Path:
        return self.path / "resumed.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def plot(self) -> Path:
        return self.path / "metrics.png"

    @property
    def replaced(self) -> Path:
        return self.path / _REPLACED

    def remove_replaced(self) -> None:
        """Once the run that replaces another one has something to show for it."""
        with writing("clear", self.replaced):
            remove(self.replaced)

    def holds(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is one of this run's, however its path is written."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()


def check_run_dir(run: RunSection, incarnation: int) -> None:
    """Cheap checks that every rank makes before anything is started.

    Raises:
        RunDirectoryError: it cannot be written.
        ConfigError: it holds another run, and the config does not say what to do with it.
    """
    check_writable(run.dir)
    place = RunDir(run.dir)
    if run.resume != "never" or incarnation > 1 or run.overwrite:
        return
    if place.replaced.exists():
        raise ConfigError(
            f"run.dir: {run.dir} holds an earlier run in {_REPLACED}/, where a start that did not "
            "come to its first step has put it: start anew (run.overwrite = true), or move what is "
            "in there back to where it was"
        )
    if place.metrics.exists():
        raise ConfigError(f"run.dir: {run.dir} holds an earlier run {_what_to_do(run.dir)}")


def _what_to_do(run_dir: Path) -> str:
    """With an earlier run there, and what that means for one that failed early."""
    found = complete_checkpoints(RunDir(run_dir).checkpoints)
    if found:
        return (
            f"with the checkpoint {found[-1].name}: go on from it (run.resume = 'auto'), replace "
            "it all (run.overwrite = true), or choose another directory"
        )
    return (
        "without a checkpoint: start anew in its place (run.overwrite = true), or choose another "
        "directory; if neither data, model nor code have changed, run.resume = 'auto' starts with "
        "step 1, too, but keeps what was generated"
    )


def begin_run(run: RunSection, incarnation: int) -> Path | None:
    """The checkpoint to go on from, if any; for a fresh start the directory is cleared. Rank 0.

    What an earlier run left is only moved, to `RunDir.replaced`: the new one may not get far.

    Raises:
        ConfigError: `run.resume` names a checkpoint that is not there.
    """
    place = RunDir(run.dir)
    with writing("clear", place.path):
        restore_folder(place.export)
    if run.resume not in ("never", "auto"):
        return _named_or_newer(run, incarnation)
    if run.resume == "never" and incarnation == 1:
        _set_aside(place)
        return None
    found = complete_checkpoints(place.checkpoints)
    if found:
        return found[-1]
    with writing("clear", run.dir):
        for name in _EARLIER:
            if name not in _KEPT_WITHOUT_CHECKPOINT:
                remove(run.dir / name)
    return None


def _set_aside(place: RunDir) -> None:
    """What is there already in `replaced` is of the earlier run, and the rest of a failed start."""
    with writing("clear", place.path):
        for name in _EARLIER:
            path, target = place.path / name, place.replaced / name
            if target.exists():
                remove(path)
            elif path.exists():
                place.replaced.mkdir(exist_ok=True)
                path.rename(target)


def _named_or_newer(run: RunSection, incarnation: int) -> Path:
    """The checkpoint that `run.resume` names; for ranks that torchrun restarted, the newest since.

    Versions are not given twice, so those of checkpoints tell which are older: of this directory's
    earlier runs, or of a history that was given up by naming this one.
    """
    place, named = RunDir(run.dir), Path(run.resume)
    if incarnation > 1 and place.resumed.exists():
        newest_then = int(json.loads(place.resumed.read_text(encoding="utf-8"))["version"])
        for path in reversed(complete_checkpoints(place.checkpoints)):
            if read_trainer_state(path).version > newest_then:
                return path
    else:
        write_json(place.resumed, {"version": newest_version(place.versions)})
    read_trainer_state(named)
    return named


class VersionCounter:
    """Weight versions of a run: each number is given once, also after a rollback.

    All ranks count alike from the same number, which rank 0 has looked up: the others must not
    read a file in which rank 0 may have gone on already. Only rank 0 writes it.

    Args:
        current: the newest version given so far; see `newest_version`.
    """

    def __init__(self, path: Path, current: int, writes: bool) -> None:
        self._path = path
        self._writes = writes
        self.current = current

    def next(self, step: int) -> int:
        """A new version: the weights after `step` optimizer steps."""
        self.current += 1
        if self._writes:
            line = json.dumps({"version": self.current, "step": step})
            with writing("write", self._path), self._path.open("a+b") as file:
                file.write(_missing_newline(file) + line.encode() + b"\n")
        return self.current


def newest_version(path: Path) -> int:
    """The newest version in a run's file of versions; 0 where there is none."""
    if not path.exists():
        return 0
    last = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            last = max(last, int(json.loads(line)["version"]))
        except (ValueError, KeyError, TypeError):
            continue  # torn by a crash: it was never used
    return last


def _missing_newline(file: BinaryIO) -> bytes:
    """What a file whose last line is torn lacks; leaves the position at its end."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's start-up included."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime_s - started_s
