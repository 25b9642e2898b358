"""The run directory (docs/run-directory.md): starting or resuming a run in it, its lock, its
versions."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self, cast

from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.settings import chosen_settings, from_wire, shown_settings
from umbra.trainer.checkpoint.trainer_state import (
    TrainerState,
    complete_checkpoints,
    read_trainer_state,
)
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import ModelSection, RunSection, TrainerConfig
from umbra.trainer.world.run_files import (
    HeldFolder,
    RunDirectoryError,
    check_writable,
    remove,
    restore_folder,
    write_json,
    writing,
)

logger = logging.getLogger(__name__)

BEGAN_AT: Final = "began at"
"""The part of a run's identity that `run_began_at` reads."""

# Files of an earlier run, which a new one moves to `_REPLACED`.
_EARLIER: Final = (
    "settings.json",
    "tokenizers",
    "prompts.msgpack",
    "eval_prompts.msgpack",
    "rows",
    "metrics.jsonl",
    "eval_samples.jsonl",
    "events.jsonl",
    "tensorboard",
    "wandb",
    "versions.jsonl",
    "resumed.json",
    "out-of-memory",
    "checkpoints",
    "ledger",
    "export",
    "summary.json",
    "report.html",
    "metrics.png",
)
_REPLACED: Final = "replaced"
# Kept if a run resumes before its first checkpoint: generated samples, what they are compared with
# (`run_identity`, `kept_prompts`), and the record of what happened before.
_KEPT_WITHOUT_CHECKPOINT: Final = (
    "ledger",
    "settings.json",
    "tokenizers",
    "prompts.msgpack",
    "eval_prompts.msgpack",
    "versions.jsonl",
    "events.jsonl",
    "out-of-memory",
)
NEW_RUN: Final = (
    "begin a new run (run.resume = 'never' and run.overwrite = true, or another run.dir)"
)
"""The remedy where a run cannot be resumed: `run.overwrite` alone changes nothing for a resume."""
_UNORDERED: Final = ("model.lora.targets", "run.loggers")
"""Lists whose order means nothing."""
_LOOK_INTERVAL_S: Final = 0.5
"""Between attempts to get the lock. A longer one delays a restart; each asks the file system."""


class RunDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.rows = path / "rows"
        self.metrics = path / "metrics.jsonl"
        self.versions = path / "versions.jsonl"
        self.resumed = path / "resumed.json"
        self.out_of_memory = path / "out-of-memory"
        self.report = path / "report.html"
        self.plot = path / "metrics.png"
        self.replaced = path / _REPLACED

    def remove_replaced(self) -> None:
        """Called once the new run has done a step."""
        with writing("clear", self.replaced):
            remove(self.replaced)

    def holds(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is one of this run's, even if its path is written differently."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()


def check_run_dir(run: RunSection, incarnation: int) -> None:
    """Cheap checks that every rank makes before anything is started. Raises RunDirectoryError if
    the directory cannot be written, ConfigError if it holds another run and the config does not
    decide what happens to it."""
    check_writable(run.dir)
    run_dir = RunDir(run.dir)
    if os.path.lexists(run_dir.checkpoints):  # it may be a link to another disk
        check_writable(run_dir.checkpoints)
    if run.resume != "never" or incarnation > 1 or run.overwrite:
        return
    if run_dir.replaced.exists():
        raise ConfigError(
            f"run.dir: {run.dir} holds an earlier run in {_REPLACED}/, which a start that failed "
            "before its first step moved there: replace it (run.overwrite = true), or move the "
            "files back"
        )
    if run_dir.metrics.exists():
        raise ConfigError(f"run.dir: {run.dir} holds an earlier run {_what_to_do(run.dir)}")


def check_kind(config: TrainerConfig | SftConfig) -> None:
    """Raises ConfigError if RL training would continue a run of SFT, or the reverse: that in the
    run directory, or that of the checkpoint that `run.resume` names."""
    run = config.run
    if run.resume == "never":
        return
    holders = {"run.dir": run.dir}
    if run.resume != "auto":
        holders["run.resume"] = Path(run.resume).absolute().parent.parent
    for name, folder in holders.items():
        recorded = _recorded(folder, "settings")
        was_sft = "sft" in recorded
        if recorded and was_sft != isinstance(config, SftConfig):
            module = "umbra.trainer.sft" if was_sft else "umbra.trainer"
            raise ConfigError(
                f"{name}: {folder} holds a run of {module}, which run.resume = {run.resume!r} "
                f"would continue: resume it by {module}, or begin with its result, model.path = "
                f"'{RunDir(folder).export}' or what umbra export makes of a checkpoint, in another "
                "directory"
            )


def _what_to_do(run_dir: Path) -> str:
    found = complete_checkpoints(RunDir(run_dir).checkpoints)
    if found:
        return (
            f"with the checkpoint {found[-1].name}: resume from it (run.resume = 'auto'), replace "
            "it all (run.overwrite = true), or choose another directory"
        )
    return (
        "without a checkpoint: replace it (run.overwrite = true), or choose another directory; if "
        "data, model and code are unchanged, run.resume = 'auto' starts with step 1, too, but "
        "keeps what was generated"
    )


def begin_run(run: RunSection, incarnation: int, damaged: Collection[Path] = ()) -> Path | None:
    """Prepares the directory; returns the checkpoint to resume from, if any, but none of
    `damaged`. Called by rank 0.

    A fresh start moves an earlier run's files to `RunDir.replaced`, because the new run may fail
    early. Raises ConfigError if `run.resume` names a missing checkpoint, RunDirectoryError if only
    damaged ones are left.
    """
    run_dir = RunDir(run.dir)
    with writing("clear", run_dir.path):
        restore_folder(run_dir.export)
    if run.resume not in ("never", "auto"):
        return _named_or_newer(run, incarnation, damaged)
    if run.resume == "never" and incarnation == 1:
        _set_aside(run_dir)
        return None
    found = [p for p in complete_checkpoints(run_dir.checkpoints) if p not in damaged]
    if found:
        return found[-1]
    if damaged:
        raise RunDirectoryError(
            f"no checkpoint in {run_dir.checkpoints} is as it was written: restore one from a "
            f"backup, or {NEW_RUN}"
        )
    with writing("clear", run.dir):
        for name in _EARLIER:
            if name not in _KEPT_WITHOUT_CHECKPOINT:
                remove(run.dir / name)
    return None


def record_settings(config: TrainerConfig | SftConfig, identity: Mapping[str, Any]) -> None:
    """Writes settings.json: the settings as they were read, those that differ from their defaults,
    the folder that relative paths are taken from, and the identity (`run_identity`). `umbra
    samples` finds the tokenizer by the settings. Called by rank 0."""
    content = {
        "folder": str(Path.cwd()),
        "chosen": chosen_settings(config),
        "settings": shown_settings(config),
        "identity": identity,
    }
    write_json(config.run.dir / "settings.json", content)


def changed_settings(config: TrainerConfig | SftConfig) -> list[str]:
    """The settings that differ from those of the run's last start, each with both values; none if
    it is not known. Settings about the resume itself do not count."""
    if not (recorded := _recorded(config.run.dir, "settings")):
        return []
    before, now = _flat(recorded), _flat(json.loads(json.dumps(shown_settings(config))))
    return [
        f"{name} = {now.get(name)!r} (was {before.get(name)!r})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in ("run.resume", "run.overwrite")
    ]


def _flat(settings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = section + key
        if isinstance(value, Mapping):
            flat |= _flat(cast("Mapping[str, Any]", value), f"{name}.")
        else:
            flat[name] = sorted(value) if value and name in _UNORDERED else value
    return flat


def recorded_identity(run_dir: Path) -> Mapping[str, Any]:
    """The identity that the last start has recorded; empty if there is none."""
    return _recorded(run_dir, "identity")


@functools.cache
def run_began_at(run_dir: Path) -> datetime:
    """When the run in this directory first started, which is now if it did not."""
    found = recorded_identity(run_dir).get(BEGAN_AT)
    return datetime.fromisoformat(found) if found else datetime.now()


def _recorded(run_dir: Path, part: str) -> Mapping[str, Any]:
    try:
        return json.loads((run_dir / "settings.json").read_text(encoding="utf-8"))[part]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def recorded_model(run_dir: Path, path: str | None = None) -> ModelSection:
    """The model that a run has trained, now at `path` if not where the run has recorded it. Raises
    ConfigError if the run has not recorded its settings."""
    place = run_dir / "settings.json"
    try:
        recorded = json.loads(place.read_text(encoding="utf-8"))
        section = from_wire(ModelSection, recorded["settings"]["model"])
        return replace(section, path=Path(path or Path(recorded["folder"]) / section.path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place} does not have the settings of the checkpoint's run ({error}): the checkpoint "
            "has to be in RUN_DIR/checkpoints"
        ) from error


def check_base(path: Path, state: TrainerState, base: str) -> None:
    """Raises ConfigError if a checkpoint's adapters are of other weights than those with the digest
    `base`. The message has the path of the right ones if its run has recorded it."""
    if state.base == base:
        return
    remedy = right_model(path, lambda start: WeightFiles(start).digest() == state.base)
    raise ConfigError(
        f"the adapters in checkpoint {path} were trained on other weights than those in "
        f"model.path: {remedy}"
    )


def right_model(checkpoint: Path, is_right: Callable[[Path], bool]) -> str:
    """The remedy where a checkpoint is of another model. It has the path that the checkpoint's run
    has recorded, if that is the right one."""
    with suppress(ConfigError, DataError):
        start = recorded_model(checkpoint.absolute().parents[1]).path
        if is_right(start):
            return f"append model.path={start}, or leave out --model of umbra export"
    return "name the model that its run started from"


def _set_aside(run_dir: RunDir) -> None:
    """Moves an earlier run to `replaced`; if that exists already, the rest is of a failed start."""
    with writing("clear", run_dir.path):
        for name in _EARLIER:
            path, target = run_dir.path / name, run_dir.replaced / name
            if target.exists():
                remove(path)
            elif path.exists():
                run_dir.replaced.mkdir(exist_ok=True)
                path.rename(target)


def _named_or_newer(run: RunSection, incarnation: int, damaged: Collection[Path]) -> Path:
    """The checkpoint that `run.resume` names, or for ranks that torchrun restarted, a newer one.
    Version numbers are never reused, so they show which checkpoints are older: those of earlier
    runs in this directory, or of a history that was discarded by naming this checkpoint."""
    run_dir, named = RunDir(run.dir), Path(run.resume)
    if incarnation > 1 and run_dir.resumed.exists():
        newest_then = int(json.loads(run_dir.resumed.read_text(encoding="utf-8"))["version"])
        for path in reversed(complete_checkpoints(run_dir.checkpoints)):
            if path not in damaged and read_trainer_state(path).version > newest_then:
                return path
    else:
        write_json(run_dir.resumed, {"version": newest_version(run_dir.versions)})
    if named in damaged:
        raise RunDirectoryError(
            f"run.resume: the checkpoint {named} is not as it was written: name another one, or "
            "restore it from a backup"
        )
    read_trainer_state(named)
    return named


class VersionCounter:
    """Weight versions of a run: each number is used once, even after a rollback.

    All ranks count from `current`, which rank 0 has read from the file (`newest_version`). Only
    rank 0 writes the file, perhaps before another rank would have read it.
    """

    def __init__(self, path: Path, current: int, writes: bool) -> None:
        self._name = path.name
        self._folder = HeldFolder(path.parent) if writes else None
        self.current = current

    def next(self, step: int) -> int:
        """A new version for the weights after `step` optimizer steps."""
        self.current += 1
        if self._folder is not None:
            line = json.dumps({"version": self.current, "step": step})
            self._folder.append(self._name, line)
        return self.current


def newest_version(path: Path) -> int:
    """0 if there is no version in the file."""
    if not path.exists():
        return 0
    last = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            last = max(last, int(json.loads(line)["version"]))
        except (ValueError, KeyError, TypeError):
            continue  # torn by a crash, so the version was never used
    return last


def process_age_s() -> float:
    """Seconds since this process was started, including the interpreter's start-up."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime_s - started_s


class RunLock:
    """Allows one run at a time in a run directory. Rank 0 holds the lock while its process uses the
    directory; the kernel releases it. Another process may hold it for `within_s` still: a network
    file system may learn late that the node of the last rank 0 is lost. One without locks allows
    any number of runs."""

    def __init__(self, folder: Path, within_s: float = 0.0) -> None:
        self._path = folder / ".lock"
        self._fd = -1
        self._within_s = within_s

    def __enter__(self) -> Self:
        """Raises ConfigError if another process holds the lock,
        RunDirectoryError without a file."""
        with writing("write", self._path):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + self._within_s
        while not (is_held := self._try_lock()) and time.monotonic() < deadline:
            time.sleep(_LOOK_INTERVAL_S)
        if not is_held:
            holder = os.read(self._fd, 200).decode(errors="replace").strip()
            self.__exit__()
            raise ConfigError(
                f"run.dir: {self._path.parent} is in use by {holder or 'another run'}: wait for "
                "its end, or choose another directory"
            )
        try:
            with writing("write", self._path):
                os.truncate(self._fd, 0)
                os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BaseException:
            self.__exit__()
            raise
        return self

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # of Lustre that is mounted without `flock`, or of FUSE
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            logger.warning(
                "%s is on a file system without locks (%s): start no second run in it",
                self._path.parent,
                error.strerror,
            )
        return True

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)
