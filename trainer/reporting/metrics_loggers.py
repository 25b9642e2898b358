"""The metrics of a run: `MetricsLog`, which umbra itself reads, and the loggers that `run.loggers`
names, which are for people."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast

from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.package_versions import is_installed
from umbra.runtime.rollout.agents.sample_text import SampleText, TurnText
from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.trainer.world.run_files import HeldFolder, write_text, writing

logger = logging.getLogger(__name__)

MetricsRow = Mapping[str, float]
_METRICS: Final = "metrics.jsonl"
_SAMPLES: Final = "eval_samples.jsonl"

LOGGER_TARGETS: Final[Mapping[str, str]] = {
    "tensorboard": "umbra.trainer.reporting.metrics_loggers:TensorboardLogger",
    "wandb": "umbra.trainer.reporting.metrics_loggers:WandbLogger",
    "mlflow": "umbra.trainer.reporting.metrics_loggers:MlflowLogger",
}
"""Loggers by name, which is also the name of the package that each needs."""

_LEAST_PAUSE_S: Final = 600.0
_PAUSE_FACTOR: Final = 20.0
"""A logger that failed is left alone for this many times as long as its failure took: MLflow tries
to reach a server for four minutes, for which the step waits."""

# Constants of TensorBoard's protocol buffers.
_DT_STRING: Final = 7
_DATA_CLASS_TENSOR: Final = 2
_SESSION_START: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    folder: Path  # the run directory
    name: str  # shown in progress and report
    settings: Mapping[str, Any]  # the whole config as `shown_settings`
    first_step: int  # that this start trains; an earlier one may have logged it and later ones


class MetricsLogger(Protocol):
    """Receives metrics of each step, and samples of each evaluation. Rank 0 owns it.

    It is constructed with a `LoggedRun`. A step waits for its writes. An UmbraError ends the run;
    after any other exception, this logger misses the next steps (see `MetricsLoggers`).
    """

    def write(self, step: int, row: MetricsRow) -> None:
        """Logs the metrics after `step` steps by name, such as `train/loss`."""
        ...

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        """Logs a few samples of an evaluation after `step` steps, the lowest reward first."""
        ...

    def close(self, *, failed: bool) -> None:
        """Called once, even after a failed write. `failed`: whether an error ended the run."""
        ...


def logger_names(names: Sequence[str] | None) -> Sequence[str]:
    """The setting `run.loggers`; by default TensorBoard if it is installed."""
    if names is not None:
        return names
    return ["tensorboard"] if is_installed("tensorboard") else []


def check_loggers(names: Sequence[str] | None) -> None:
    """Raises ConfigError if the package that a logger needs is not installed."""
    for name in names or ():
        if not is_installed(name):
            raise ConfigError(
                f"run.loggers names {name!r}, but the package {name} is not installed: run pip "
                f"install {name}, or leave it out"
            )


class MetricsLoggers:
    """Owns all loggers of `run.loggers`, which start with the first row. `note` shows a line
    to the operator. One that fails is tried again later: its server may be back."""

    def __init__(
        self,
        names: Sequence[str],
        run: LoggedRun,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = list(names)
        self._run = run
        self._note = note
        self._clock = clock
        self._open: dict[str, MetricsLogger] = {}
        self._retry_at: dict[str, float] = {}  # of loggers whose last use failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        for name in list(self._open):  # loggers that failed hold connections, too
            self._use(name, lambda opened: opened.close(failed=kind is not None))

    def write(self, step: int, row: MetricsRow) -> None:
        """Raises UmbraErrors of the loggers."""
        self._use_all(lambda opened: opened.write(step, row))

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        """Raises UmbraErrors of the loggers."""
        self._use_all(lambda opened: opened.write_samples(step, samples))

    def _logger(self, name: str) -> MetricsLogger:
        if name not in self._open:
            # As late as possible: the imports take seconds of processor time that engines can use.
            module, _, cls = LOGGER_TARGETS[name].partition(":")
            self._open[name] = getattr(importlib.import_module(module), cls)(self._run)
        return self._open[name]

    def _use_all(self, use: Callable[[MetricsLogger], object]) -> None:
        for name in self._names:
            if self._clock() < self._retry_at.get(name, -math.inf):
                continue
            if self._use(name, use) and self._retry_at.pop(name, None) is not None:
                self._note(f"run.loggers: {name} works again; metrics.jsonl has what it missed")

    def _use(self, name: str, use: Callable[[MetricsLogger], object]) -> bool:
        began = self._clock()
        try:
            use(self._logger(name))
        except UmbraError:
            raise
        except Exception as error:  # of any library; metrics.jsonl has the numbers
            if name not in self._retry_at:
                logger.exception("the metrics logger %s failed", name)
                self._note(f"run.loggers: {name} failed and is tried again later: {error}")
            ended = self._clock()
            self._retry_at[name] = ended + max(_LEAST_PAUSE_S, _PAUSE_FACTOR * (ended - began))
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSample:
    """A sample of an evaluation as text: the columns of the table that loggers show."""

    prompt_id: str
    prompt: str
    completion: str  # all turns; where some were given, each begins with its source
    reward: float
    num_tokens: int  # of the whole completion
    finish_reason: str

    @classmethod
    def decode(
        cls, decode: Callable[[Sequence[int]], str], sample: Mapping[str, Any]
    ) -> EvalSample:
        """`sample` is of an evaluation's outcome, and may lack tokens at both ends."""
        prompt, tokens = sample["prompt_tokens"], sample["tokens"]
        segments = [Segment(*segment) for segment in sample["segments"]]
        text = SampleText.decode(decode, prompt, tokens, segments)
        num_before = sample["num_prompt_tokens"] - len(prompt)
        num_after = sample["num_tokens"] - len(tokens)
        return cls(
            prompt_id=sample["prompt_id"],
            prompt=f"[{num_before} tokens before]\n" * bool(num_before) + text.prompt,
            completion=_joined(text.turns) + f"\n[{num_after} tokens after]" * bool(num_after),
            reward=float(sample["reward"]),
            num_tokens=sample["num_tokens"],
            finish_reason=sample["finish_reason"],
        )


def _joined(turns: Sequence[TurnText]) -> str:
    if not any(turn.is_given for turn in turns):
        return "".join(turn.text for turn in turns)
    return "\n".join(f"[{'given' if turn.is_given else 'policy'}] {turn.text}" for turn in turns)


class TensorboardLogger:
    """A `MetricsLogger` of TensorBoard events in the run directory's `tensorboard`; owns its file.
    TensorBoard's own writer has a thread, where a full disk would print a stack trace, unnoticed by
    umbra before the next step."""

    def __init__(self, run: LoggedRun) -> None:
        self._folder = run.folder / "tensorboard"
        self._protobuf: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        with writing("write to", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / name).open("ab")
            self._records = records.RecordWriter(self._file)
            self._put(file_version="brain.Event:2")
            # TensorBoard then hides what earlier files have from this step on.
            self._put(step=run.first_step, session_log={"status": _SESSION_START})

    def close(self, *, failed: bool) -> None:
        # All events were flushed, so a failure to close is not an error.
        with contextlib.suppress(OSError):
            self._file.close()

    def write(self, step: int, row: MetricsRow) -> None:
        """Raises RunDirectoryError if the disk is full or the like."""
        values = [{"tag": name, "simple_value": value} for name, value in row.items()]
        with writing("write to", self._folder):
            self._put(step=step, summary={"value": values})

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        """Writes one table; raises as `write` does. TensorBoard reads cells as Markdown, so their
        texts are code blocks."""
        columns = [field.name for field in fields(EvalSample)]
        cells = [[_code_block(str(getattr(each, name))) for name in columns] for each in samples]
        table = [columns, *cells]
        tensor = {
            "dtype": _DT_STRING,
            "tensor_shape": {"dim": [{"size": len(table)}, {"size": len(columns)}]},
            "string_val": [cell.encode() for row in table for cell in row],
        }
        metadata = {"plugin_data": {"plugin_name": "text"}, "data_class": _DATA_CLASS_TENSOR}
        value = {"tag": "eval/samples", "tensor": tensor, "metadata": metadata}
        with writing("write to", self._folder):
            self._put(step=step, summary={"value": [value]})

    def _put(self, **fields: Any) -> None:
        event = self._protobuf.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._file.flush()


def _code_block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


class MlflowLogger:
    """A `MetricsLogger`; owns one MLflow run per start, in an experiment named after the run.
    MLflow's own variables configure it, such as MLFLOW_TRACKING_URI."""

    def __init__(self, run: LoggedRun) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._metric: Any = mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(run.name)
        experiment = found.experiment_id if found else self._client.create_experiment(run.name)
        self._run_id: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        self._client.log_dict(self._run_id, dict(run.settings), "config.json")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def write(self, step: int, row: MetricsRow) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now_ms, step) for name, value in row.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        content = {"samples": [asdict(sample) for sample in samples]}
        self._client.log_dict(self._run_id, content, f"eval_samples/{step}.json")


class WandbLogger:
    """A `MetricsLogger`; owns one W&B run per start. Starts of one run share a W&B group. W&B's own
    variables configure it, such as WANDB_PROJECT."""

    def __init__(self, run: LoggedRun) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(
            dir=str(run.folder), name=run.name, group=run.name, config=dict(run.settings)
        )
        # An evaluation beside training comes later than its step, and W&B's own only rises.
        self._run.define_metric("*", step_metric="step")

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    def write(self, step: int, row: MetricsRow) -> None:
        self._run.log({"step": step, **row})

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        columns = [field.name for field in fields(EvalSample)]
        rows = [[getattr(sample, name) for name in columns] for sample in samples]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"step": step, "eval/samples": table})


class MetricsLog:
    """Appends a line per step to `folder`/metrics.jsonl, and one per evaluation to
    `folder`/eval_samples.jsonl. umbra reads both itself. A `MetricsLogger`. Lines from `first_step`
    on are from before a rollback, and are removed."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._first_step = first_step
        self._folder = HeldFolder(folder)

    @property
    def path(self) -> Path:
        """metrics.jsonl, wherever the folder is moved. Raises RunDirectoryError as `append`."""
        return self._folder.path / _METRICS

    def __enter__(self) -> Self:
        for name in (_METRICS, _SAMPLES):
            _keep_steps_before(self._folder.path / name, self._first_step)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Has nothing to close."""

    def write(self, step: int, row: MetricsRow) -> None:
        """A reader sees the step at once. Raises RunDirectoryError as `append` does."""
        self._append(_METRICS, step, row)

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        self._append(_SAMPLES, step, {"samples": [asdict(s) for s in samples]})

    def _append(self, name: str, step: int, row: Mapping[str, Any]) -> None:
        line = {"step": step, "time": round(time.time(), 3), **row}
        self._folder.append(name, json.dumps(line))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl, except torn lines and lines that are not metrics."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row: Any = json.loads(line)
                if isinstance(row, dict) and "step" in row:
                    rows.append(cast("dict[str, Any]", row))
    return rows


def merge_steps(rows: Sequence[MetricsRow]) -> list[dict[str, float]]:
    """One row for each step, with its evaluation: the last, because a resumed run repeats one."""
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return list(merged.values())


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Replaces the file as a whole, so that a kill halfway does not lose rows."""
    kept = [row for row in read_metrics(path) if row["step"] < first_step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
