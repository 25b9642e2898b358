"""Rank 0's reports of a run: metrics, progress, and at the end summary and report."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

from umbra.runtime.dash.run_view import RunView
from umbra.runtime.settings import shown_settings
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.checkpoint.run_dir import RunDir, process_age_s
from umbra.trainer.checkpoint.trainer_state import best_checkpoint, complete_checkpoints
from umbra.trainer.config.algorithm_names import GROUP_ADVANTAGES
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.metrics_loggers import (
    EvalSample,
    LoggedRun,
    MetricsLog,
    MetricsLoggers,
    MetricsRow,
    logger_names,
    read_metrics,
)
from umbra.trainer.reporting.metrics_plot import save_plot
from umbra.trainer.world.run_files import write_json, write_text, writing

Rows = Sequence[Mapping[str, float]]
_INLINE: Final = "'unsafe-inline'"
_POLICY: Final = f"default-src 'none'; img-src data:; style-src {_INLINE}; script-src {_INLINE}"
_REWARD: Final = "rollout/reward_mean"
_PACE_WINDOW: Final = 20
"""Recent steps whose mean duration predicts the remaining time. Fewer make the prediction jump,
more make it lag behind changes."""
_EQUAL_STEPS: Final = 5
"""Steps in a row whose prompts mostly teach nothing, before a warning. Fewer warn of a chance; more
let a run go on in vain."""
_EQUAL_SHARE: Final = 3 / 4
"""Share of such prompts. With less, ordinary runs warn; with more, hardly any does."""
_LEARNED_SHARE: Final = 0.9
"""Where the mean reward is higher than this between the least and the largest, equal rewards are a
success. With less, runs that never learn are silent; with more, ones that have learned warn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """summary.json."""

    accuracy_before: float | None  # on held-out prompts, of the starting model; None: not evaluated
    accuracy_after: float | None  # the same at the end
    wall_s: float  # from the start of rank 0's process
    steps: int  # optimizer steps done, also before a resume
    engine_restarts: int
    stopped_by: str = ""  # the signal that ended the run early
    steps_before: int = 0  # steps before this start, which `wall_s` does not include
    reward_first: float | None = None  # mean over the first tenth of the steps
    reward_last: float | None = None  # mean over the last tenth
    files: Mapping[str, str] = field(default_factory=dict[str, str])  # path of each result by name


def write_summary(folder: Path, summary: Summary) -> Path:
    path = folder / "summary.json"
    write_json(path, asdict(summary))
    return path


def reward_ends(rows: Rows) -> tuple[float | None, float | None]:
    """Mean reward over the first and the last tenth of the steps."""
    rewards = [row[_REWARD] for row in rows if _REWARD in row]
    if not rewards:
        return None, None
    span = max(1, len(rewards) // 10)
    return sum(rewards[:span]) / span, sum(rewards[-span:]) / span


def write_report(path: Path, run_dir: Path) -> None:
    """Writes the page of `umbra dash` as one file, with its scripts, its styles and the answers
    that the server would give."""
    static = files("umbra.runtime.dash") / "static"
    recorded = asyncio.run(RunView(run_dir).recorded()).replace("<", "\\u003c")

    def inlined(found: re.Match[str]) -> str:
        text = (static / found["name"]).read_text(encoding="utf-8")
        if found["name"].endswith(".svg"):
            return found[0].replace(found["name"], f"data:image/svg+xml,{quote(text)}")
        kind = "style" if found["name"].endswith(".css") else "script"
        return f"<{kind}>{text}</{kind}>"

    page = (static / "index.html").read_text(encoding="utf-8")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page = page.replace("<title>", f"{policy}\n<title>", 1)
    page = re.sub(r'<(link|script) .*(href|src)="(?P<name>.+)">(</script>)?', inlined, page)
    data = f'<script id="recorded" type="application/json">{recorded}</script>'
    write_text(path, page.replace("<script>", f"{data}\n<script>", 1))


class StepPace:
    """Predicts the remaining time from the steps of this start. The first of them does not count:
    it compiles, captures graphs and allocates."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._ends: deque[float] = deque(maxlen=_PACE_WINDOW + 1)

    def step_done(self, step: int, now: float) -> float | None:
        """Seconds until the last step; None after the first step. `now` is of a monotonic clock."""
        self._ends.append(now)
        if len(self._ends) < 2:
            return None
        pace_s = (now - self._ends[0]) / (len(self._ends) - 1)
        return pace_s * (self._total_steps - step)


class RunReporter:
    """Collects events of a run. On ranks other than 0 log and loggers are None. The accuracies are
    of the first and the last evaluation."""

    def __init__(
        self,
        config: TrainerConfig | SftConfig,
        display: ProgressDisplay,
        log: MetricsLog | None,
        loggers: MetricsLoggers | None = None,
        steps_before: int = 0,
    ) -> None:
        self.steps_before = steps_before
        self._config = config
        self._log = log
        self._loggers = loggers
        self._display = display
        self._pace = StepPace(config.train.total_steps)
        self._warned_of: set[str] = set()
        self._equal_steps = 0  # the last ones, whose prompts mostly teach nothing
        self._tokenizer: ModelTokenizer | None = None
        self.accuracy_before: float | None = None
        self.accuracy_after: float | None = None

    @classmethod
    @contextmanager
    def open(
        cls,
        config: TrainerConfig | SftConfig,
        display: ProgressDisplay,
        step: int,
        *,
        is_lead: bool,
    ) -> Generator[Self]:
        """Opens rank 0's log and loggers, and shows where the run starts: after `step` steps."""
        display.begin_steps(config.run_name, step, config.train.total_steps)
        if not is_lead:
            yield cls(config, display, None, steps_before=step)
            return
        logged = LoggedRun(
            folder=config.run.dir,
            name=config.run_name,
            settings=shown_settings(config),
            first_step=step + 1,
        )
        with (
            MetricsLog(config.run.dir, first_step=step + 1) as log,
            MetricsLoggers(logger_names(config.run.loggers), logged, display.note) as loggers,
        ):
            _show_start(config, display, step)
            yield cls(config, display, log, loggers, step)

    def step_done(self, step: int, row: Mapping[str, float]) -> None:
        """Logs and shows step `step` (from 1)."""
        left_s = self._pace.step_done(step, time.monotonic())
        row = {**row, **({} if left_s is None else {"time/left_s": left_s})}
        self._write(step, row)
        if self._log is not None:
            RunDir(self._config.run.dir).remove_replaced()
        self._display.step_done(step, row)

    def look_at_rollouts(self, config: TrainerConfig, step: int, row: Mapping[str, float]) -> None:
        """Warns of a step that teaches nothing or whose completions never end, and of several whose
        prompts mostly teach nothing, once of each."""
        if row["rollout/tokens"] == 0:
            self._note_once("tokens", f"step {step} trained on nothing: {_why_no_tokens(config)}")
        if row["rollout/truncated_share"] == 1.0:
            limit = config.rollout.max_new_tokens
            remedy = (
                f"raise rollout.max_new_tokens = {limit}; if the model ends its turns with another "
                "token, add it to rollout.stop_token_ids"
                if row["rollout/completion_len_max"] == limit
                else "raise pool.max_context_len, or give less between the turns of rollout.agent"
            )
            self._note_once(
                "ends",
                f"warning: no completion of step {step} ended with an end token, all "
                f"{config.samples_per_step} were truncated: {remedy}",
            )
        is_zero = row["rollout/reward_min"] == row["rollout/reward_max"] == 0.0
        if is_zero and config.reward.has_functions:
            self._note_once(
                "rewards",
                f"warning: every reward of step {step} is 0; if `umbra samples "
                f"{config.run.dir}` shows good completions, check that the reward function "
                "reads their format, and does not catch errors of its own code and return 0 for "
                "them",
            )

        self._look_at_equal_rewards(config, step, row)

    def _look_at_equal_rewards(
        self, config: TrainerConfig, step: int, row: Mapping[str, float]
    ) -> None:
        low, high = row["rollout/reward_min"], row["rollout/reward_max"]
        has_learned = row["rollout/reward_mean"] - low > _LEARNED_SHARE * (high - low) > 0
        limit = _EQUAL_SHARE * config.rollout.groups_per_step
        is_mostly_equal = row["rollout/zero_variance_groups"] > limit and not has_learned
        self._equal_steps = self._equal_steps + 1 if is_mostly_equal else 0
        if self._equal_steps >= _EQUAL_STEPS and config.train.advantage in GROUP_ADVANTAGES:
            self._note_once(
                "equal rewards",
                f"warning: in the steps {step - _EQUAL_STEPS + 1} to {step}, more than three "
                "quarters of the prompts had completions of equal reward, from which "
                f"train.advantage = {config.train.advantage!r} learns nothing: use a reward that "
                "distinguishes more, or set rollout.drop_zero_variance_groups = true",
            )

    def _note_once(self, what: str, line: str) -> None:
        if what not in self._warned_of:
            self._warned_of.add(what)
            self._display.note(line)

    def evaluated(
        self, step: int, result: Mapping[str, Any], version: int | None = None, *, is_last: bool
    ) -> dict[str, float]:
        """Logs and shows an evaluation after `step` steps; returns its metrics. With `version`,
        that of these weights, they have the share of tokens that later ones generated."""
        accuracy = float(result["accuracy"])
        low, high = result["accuracy_interval"]
        if self.accuracy_before is None and self._config.train.eval_at_start:
            self.accuracy_before = self._earlier_accuracy(accuracy)
        row = {
            **_eval_metrics("eval", result),
            "eval/completion_len_mean": float(result["completion_len_mean"]),
        }
        for name, scores in result["sets"].items():
            row |= _eval_metrics(f"eval/{name}", scores)
        if version is not None:
            later = sum(num for at, num in result["versions"] if at > version)
            row["eval/later_tokens_share"] = later / max(1, int(result["tokens"]))
        if is_last:
            self.accuracy_after = accuracy
        self._write(step, row)
        self._write_samples(step, result["samples"])
        self._display.note(
            f"after step {step}: accuracy {accuracy:.3f} [{low:.3f}, {high:.3f}] on "
            f"{result['num_prompts']} held-out prompts"
        )
        return row

    def evaluated_loss(self, step: int, loss: float, num_rows: int) -> None:
        """Logs, if it is finite, and shows the mean loss of the tokens of held-out rows after
        `step` steps."""
        if math.isfinite(loss):
            self._write(step, {"eval/loss": loss})
        self._display.note(f"after step {step}: loss {loss:.4f} on {num_rows} held-out rows")

    def _write(self, step: int, row: MetricsRow) -> None:
        for log in (self._log, self._loggers):
            if log is not None:
                log.write(step, row)

    def _write_samples(self, step: int, found: Sequence[Mapping[str, Any]]) -> None:
        if self._log is None or not found:
            return
        if self._tokenizer is None:
            path = tokenizer_path(self._log.path.parent)
            self._tokenizer = ModelTokenizer.open(path)
        decode = self._tokenizer.decode_all
        samples = [EvalSample.decode(decode, sample) for sample in found]
        for log in (self._log, self._loggers):
            if log is not None:
                log.write_samples(step, samples)

    def _earlier_accuracy(self, accuracy: float) -> float:
        """The starting model's accuracy; a resumed run has it from its first part."""
        if self._log is not None:
            for row in read_metrics(self._log.path):
                if "eval/accuracy" in row:
                    return row["eval/accuracy"]
        return accuracy


def _eval_metrics(name: str, scores: Mapping[str, Any]) -> dict[str, float]:
    low, high = scores["accuracy_interval"]
    return {
        f"{name}/accuracy": float(scores["accuracy"]),
        f"{name}/accuracy_low": low,
        f"{name}/accuracy_high": high,
        f"{name}/reward_mean": float(scores["mean_reward"]),
        **{f"{name}/pass_at_{k}": value for k, value in scores["pass_at"].items() if k != "1"},
    }


def _show_start(config: TrainerConfig | SftConfig, display: ProgressDisplay, step: int) -> None:
    run_dir, total = RunDir(config.run.dir), config.train.total_steps
    if run_dir.replaced.exists():
        display.note(f"the earlier run is kept in {run_dir.replaced} until a step is done")
    if step:
        display.note(f"resuming after step {step}")
        if step >= total:
            display.note(f"train.steps is {total}: no step is left to do")
    elif config.run.resume == "auto":
        display.note(f"no complete checkpoint in {run_dir.checkpoints}: starting from scratch")


def _why_no_tokens(config: TrainerConfig) -> str:
    found = f"the policy generated no token in any of its {config.samples_per_step} completions"
    if config.rollout.agent is None:
        return f"{found}; see the engines' logs in {config.run.dir / 'logs'}"
    return (
        f"{found}; check that rollout.agent {config.rollout.agent} awaits ctx.generate (calls of "
        "ctx.pool or with lora= do not count) before its tokens fill pool.max_context_len"
    )


def finish(
    config: TrainerConfig | SftConfig,
    reporter: RunReporter,
    *,
    steps: int,
    engine_restarts: int,
    stopped_by: str,
) -> Summary:
    """Writes summary.json, and the plot and report of a run that was not stopped. Rank 0."""
    run_dir = RunDir(config.run.dir)
    rows = read_metrics(run_dir.metrics)
    first, last = reward_ends(rows)
    files = {"metrics": str(run_dir.metrics)}
    if saved := complete_checkpoints(run_dir.checkpoints):
        files["checkpoint"] = str(saved[-1])
    if best := best_checkpoint(run_dir.checkpoints):
        files["best checkpoint"] = str(best)
    if not stopped_by:  # plotting takes longer than a user who stops a run should wait
        files |= {"report": str(run_dir.report), "plot": str(run_dir.plot)}
        if config.train.export:
            files["model"] = str(run_dir.export)
        with writing("write", run_dir.plot):
            save_plot(rows, run_dir.plot, config.run_name)
    summary = Summary(
        accuracy_before=reporter.accuracy_before,
        accuracy_after=reporter.accuracy_after,
        wall_s=round(process_age_s(), 2),
        steps=steps,
        steps_before=reporter.steps_before,
        engine_restarts=engine_restarts,
        stopped_by=stopped_by,
        reward_first=first,
        reward_last=last,
        files=files,
    )
    write_summary(run_dir.path, summary)
    if not stopped_by:
        write_report(run_dir.report, run_dir.path)
    return summary


def closing_lines(summary: Summary) -> list[str]:
    how = f"stopped by {summary.stopped_by} after" if summary.stopped_by else "done:"
    before = f" ({summary.steps_before} of them before this start)" * bool(summary.steps_before)
    lines = [f"{how} {summary.steps} steps in {summary.wall_s:.1f} s with the start{before}"]
    if summary.stopped_by and summary.steps:
        lines.append("to resume, start the same command again with run.resume=auto")
    if summary.accuracy_after is not None:
        before = summary.accuracy_before
        lines.append(
            "held-out accuracy "
            + (f"{before:.3f} before, " if before is not None else "")
            + f"{summary.accuracy_after:.3f} after"
        )
    if summary.engine_restarts:
        lines.append(f"engines restarted: {summary.engine_restarts}")
    lines += [f"{name}: {path}" for name, path in summary.files.items()]
    return lines
