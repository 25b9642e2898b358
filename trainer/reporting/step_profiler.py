"""Profiles of chosen training steps by torch.profiler, and the share that their GPU worked."""

from __future__ import annotations

import gzip
import logging
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from umbra.trainer.config.trainer_config import RunSection

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the training of `run.profile_steps` on this rank, which takes such a step longer.

    A profile is RUN_DIR/trace/torch.RANK.step-N.json.gz, with operators, kernels and what launched
    them, for https://ui.perfetto.dev.
    """

    def __init__(self, run: RunSection, rank: int) -> None:
        self._steps = frozenset(run.profile_steps)
        self._folder = run.dir / "trace"
        self._rank = rank

    @contextmanager
    def step(self, step: int) -> Generator[dict[str, float]]:
        """Profiles the block if `step` is chosen. On CUDA, the mapping then gets
        `train/gpu_busy_share`: the time with a kernel or copy, of that from the first to the last.
        """
        metrics: dict[str, float] = {}
        if step not in self._steps:
            yield metrics
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            yield metrics
        try:
            self._write(recorded, self._folder / f"torch.{self._rank}.step-{step}.json.gz")
        except OSError as error:  # a run does not fail because of its profile
            logger.warning("no profile of step %d: %s", step, error)
        if spans := device_spans(recorded):
            metrics["train/gpu_busy_share"] = busy_share(spans)

    def _write(self, recorded: profile, path: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        plain = path.with_suffix("")
        try:
            recorded.export_chrome_trace(str(plain))
            with plain.open("rb") as text, gzip.open(path, "wb", compresslevel=3) as packed:
                shutil.copyfileobj(text, packed)
        finally:
            plain.unlink(missing_ok=True)


def device_spans(recorded: profile) -> list[tuple[float, float]]:
    """Begin and end of each kernel and copy, in microseconds."""
    events: Any = recorded.events() or []
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        # Annotations, such as FSDP's, are no work.
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


def busy_share(spans: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first begin to the last end that lies within a span."""
    ordered = sorted(spans)
    first = end = ordered[0][0]
    busy = 0.0
    for began, ended in ordered:
        busy += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return busy / (end - first) if end > first else 1.0
