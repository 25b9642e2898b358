"""Run directory, metrics, progress, report and summary."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from minimal_config import MINIMAL

from umbra.runtime.engine_api.pool_settings import AuxiliaryPoolSettings
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.reports.run_metrics import last_steps
from umbra.runtime.terminal_text import format_duration
from umbra.runtime.text.model_files import read_model_config
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.checkpoint.run_dir import (
    RunDir,
    RunLock,
    VersionCounter,
    begin_run,
    changed_settings,
    check_kind,
    check_run_dir,
    complete_checkpoints,
    newest_version,
    process_age_s,
    record_settings,
)
from umbra.trainer.checkpoint.trainer_state import TrainerState, read_trainer_state
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import (
    CriticSection,
    LoraSection,
    RunSection,
    TrainerConfig,
)
from umbra.trainer.replay.replay_plan import ReplayPlan, recorded_config
from umbra.trainer.replay.replay_run import ReplayReport
from umbra.trainer.reporting.console import Count, ProgressDisplay, format_step
from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter
from umbra.trainer.reporting.metrics_loggers import MetricsLog, read_metrics
from umbra.trainer.reporting.run_reporter import (
    RunReporter,
    StepPace,
    closing_lines,
    finish,
    reward_ends,
    write_report,
)
from umbra.trainer.world.run_files import RunDirectoryError, check_writable, write_text, writing

ROW = {
    "rollout/reward_mean": 0.4312,
    "rollout/reward_min": 0.0,
    "rollout/reward_max": 1.0,
    "rollout/zero_variance_groups": 8.0,
    "rollout/tokens": 6_049.0,
    "rollout/tokens_per_s": 17_234.0,
    "rollout/truncated_share": 0.25,
    "rollout/completion_len_max": 8.0,
    "time/rollout_s": 0.351,
    "time/sync_s": 0.02,
    "time/train_s": 0.184,
    "time/step_s": 0.6,
    "train/loss": -0.01,
}


def make_config(folder: Path, **train: object) -> TrainerConfig:
    return check_config(
        TrainerConfig,
        {
            "run": {"dir": str(folder), "name": "a <test>"},
            "model": {"path": str(folder / "model")},
            "data": {"train": "t.jsonl", "eval": "e.jsonl"},
            "reward": {"function": "r:f"},
            "train": {"steps": 4, "export": False, **train},
        },
        "config",
    )


def reporter(
    config: TrainerConfig, log: MetricsLog | None = None, steps_before: int = 0
) -> RunReporter:
    display = ProgressDisplay(None)
    display.begin_steps(config.run_name, steps_before, config.train.total_steps)
    return RunReporter(config, display, log, steps_before=steps_before)


def evaluation(accuracy: float, *samples: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "accuracy_interval": [accuracy - 0.125, accuracy + 0.125],
        "mean_reward": accuracy,
        "completion_len_mean": 3.0,
        "num_prompts": 8,
        "pass_at": {"1": accuracy},
        "sets": {},
        "samples": list(samples),
    }


# -- metrics -----------------------------------------------------------------------------


def test_metrics_are_one_json_line_a_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, first_step=1) as log:
        log.write(1, ROW)
        log.write(2, ROW)

        assert [row["step"] for row in read_metrics(log.path)] == [1, 2]  # before it is closed

    assert read_metrics(tmp_path / "metrics.jsonl")[0]["rollout/reward_mean"] == 0.4312


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path: Path) -> None:
    assert last_steps(tmp_path) == []
    with MetricsLog(tmp_path, first_step=1) as log:
        for step in (1, 2, 3):
            log.write(step, {"run": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ru')  # torn by a crash

    with MetricsLog(tmp_path, first_step=3) as log:
        log.write(3, {"run": 2.0})

    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["run"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_kill_while_a_resume_cuts_steps_costs_no_other_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, first_step=1) as log:
        for step in (1, 2, 3):
            log.write(step, {"run": 1.0})
    before = log.path.read_text()

    with log.path.open() as opened_before, MetricsLog(tmp_path, first_step=3):
        kept = opened_before.read()

    assert kept == before, "it is replaced as a whole, never emptied first"


# -- progress ----------------------------------------------------------------------------


def test_a_step_is_one_line_with_reward_speed_times_and_eta() -> None:
    assert format_step(12, 100, ROW | {"time/left_s": 52.4}) == (
        "step  12/100  reward 0.431  17.2k tok/s  gen 0.35s  sync 0.02s  train 0.18s  eta 0:52"
    )


def test_a_step_whose_speed_is_not_known_has_none_on_its_line() -> None:
    row = {name: value for name, value in ROW.items() if name != "rollout/tokens_per_s"}

    assert "reward 0.431  - tok/s  gen 0.35s" in format_step(12, 100, row)


@pytest.mark.parametrize(
    ("speed", "text"), [(7.4, "7 tok/s"), (999.4, "999 tok/s"), (999.6, "1.0k tok/s")]
)
def test_a_speed_below_a_thousand_is_in_whole_tokens(speed: float, text: str) -> None:
    assert f"  {text}  " in format_step(12, 100, ROW | {"rollout/tokens_per_s": speed})


def test_the_line_of_a_step_without_rollouts_has_its_loss() -> None:
    row = {"train/loss": 1.4312, "sft/tokens_per_s": 17204.0, "time/train_s": 0.18}

    line = format_step(12, 100, row | {"time/left_s": 52.4})

    assert line == "step  12/100  loss 1.431  17.2k tok/s  train 0.18s  eta 0:52"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (727, "12:07"), (12_300, "3:25:00")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_eta_is_the_pace_of_recent_steps_without_the_first_which_compiles() -> None:
    pace = StepPace(total_steps=200)

    ends = [pace.step_done(step, 90.0 + 2.0 * step) for step in range(1, 101)]
    after_a_resume = StepPace(total_steps=200).step_done(101, 4000.0)

    assert ends[0] is None, "nothing is known but a step that took 90 s"
    assert (ends[1], ends[2], ends[-1]) == (2.0 * 198, 2.0 * 197, 2.0 * 100)
    assert after_a_resume is None
    assert format_step(101, 200, ROW).endswith("eta -:--")


@pytest.mark.parametrize(
    ("step", "resume", "has_earlier", "lines"),
    [
        (0, "never", True, ["  the earlier run is kept in {replaced} until a step is done"]),
        (0, "auto", False, ["  no complete checkpoint in {checkpoints}: starting from scratch"]),
        (3, "auto", False, ["  resuming after step 3"]),
        (
            4,
            "auto",
            False,
            ["  resuming after step 4", "  train.steps is 4: no step is left to do"],
        ),
    ],
)
def test_a_run_shows_where_it_starts_and_its_steps(
    tmp_path: Path, step: int, resume: str, has_earlier: bool, lines: list[str]
) -> None:
    config = make_config(tmp_path, steps=4)
    config = replace(config, run=replace(config.run, resume=resume))
    folder, stream = RunDir(tmp_path), io.StringIO()
    if has_earlier:
        folder.replaced.mkdir()
    for is_lead in (True, False):
        display = ProgressDisplay(stream if is_lead else None)
        with RunReporter.open(config, display, step, is_lead=is_lead) as journal:
            if step < 4:
                journal.step_done(step + 1, ROW)
                lines = [*lines, format_step(step + 1, 4, ROW)] if is_lead else lines
    places = {"replaced": folder.replaced, "checkpoints": folder.checkpoints}

    assert stream.getvalue().splitlines() == [line.format(**places) for line in lines]
    assert not folder.replaced.exists()


class Watch:
    """A display with a clock of its own, which looks at what is in progress each second."""

    def __init__(self, stream: io.StringIO | None = None) -> None:
        self.stream = stream or io.StringIO()
        self.now = 0.0
        self.display = ProgressDisplay(self.stream, lambda: self.now)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            self.display.refresh()

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_what_takes_long_is_shown_ever_less_often_and_what_is_short_never() -> None:
    watch = Watch()

    with watch.display.activity("loading the model"):
        watch.wait(4)
    with watch.display.activity("starting engines", ask=lambda: (int(watch.now) // 20, 2)):
        watch.wait(36)

    assert watch.lines == [
        "starting engines: 0 of 2, for 0:01",
        "starting engines: 0 of 2, for 0:11",
        "starting engines: 1 of 2, for 0:31",
        "starting engines took 0:36",
    ]


def test_once_steps_are_done_only_an_unusually_long_wait_is_shown() -> None:
    watch = Watch()
    answers: list[Count] = [(31, 32, "1 wait for the reward function")]

    watch.display.begin_steps("run", 0, 9)
    watch.display.step_done(1, ROW | {"time/step_s": 30.0})
    with watch.display.activity("generating for step 2", unit="prompts", ask=lambda: answers[-1]):
        watch.wait(89)
        assert len(watch.lines) == 1
        watch.wait(1)
        answers.append((31, 32))
        watch.wait(180)

    assert watch.lines[1:] == [
        "  generating for step 2: 31 of 32 prompts, 1 wait for the reward function, for 1:30",
        "  generating for step 2: 31 of 32 prompts, for 4:30",
        "  generating for step 2 took 4:30",
    ]


def test_a_count_that_cannot_be_had_or_has_no_total_is_left_out() -> None:
    def no_answer() -> tuple[int, int]:
        raise DataError("the manager is being restarted")

    watch = Watch()

    with (
        watch.display.activity("evaluating", unit="prompts", ask=no_answer),
        watch.display.activity("tokenizing the data", unit="prompts") as tokenizing,
    ):
        for _ in range(1200):
            tokenizing.count()
        watch.wait(5)

    assert watch.lines[0] == ("evaluating: for 0:05; tokenizing the data: 1,200 prompts, for 0:05")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_screen(text: str) -> list[str]:
    """What a terminal shows after this text, without colors and lengths of bars."""
    rows, row = [""], 0
    for part in re.findall("\x1b\\[[0-9?;]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part.endswith("[1A"):
            row -= 1
        elif part.endswith("[2K"):
            rows[row] = ""
        elif part[0] not in "\x1b\r":
            rows[row] += part
    return [re.sub("[━╸╺]+", "━", line).rstrip() for line in rows if line.strip()]


def test_a_terminal_has_a_row_for_all_that_is_in_progress_below_the_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    watch = Watch(Terminal())
    monkeypatch.setattr(sys, "stderr", watch.stream)

    with watch.display:
        watch.display.begin_steps("run", 1, 4)
        with watch.display.activity("evaluating", unit="prompts", ask=lambda: (3, 8)):
            watch.wait(2)
            watch.display.note("engine policy-0 died")
            print("another line", file=sys.stderr)
            during = on_screen(watch.stream.getvalue())
        after = on_screen(watch.stream.getvalue())
    closed = on_screen(watch.stream.getvalue())

    lines = ["  engine policy-0 died", "another line"]
    steps = "run        ━ 1 of 4 steps   0:02"
    assert during == [*lines, steps, "evaluating ━ 3 of 8 prompts 0:02"]
    assert after == [*lines, "run ━ 1 of 4 steps 0:02"]
    assert closed == lines
    assert watch.stream.getvalue().rfind("\x1b[?25h") > watch.stream.getvalue().rfind("\x1b[?25l")


def test_neither_notes_nor_errors_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for_torchrun = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(for_torchrun))

    ProgressDisplay(None).note("not of this rank")
    ProgressDisplay(sys.stderr).note("sample e0/\x1b[2J/0 of é")
    FatalErrorReporter(0, 0.0).report(DataError("row \x9b1m7\n\tid \r"))

    assert capsys.readouterr().err.splitlines() == [
        r"sample e0/\x1b[2J/0 of é",
        "rank 0: DataError: row \\x9b1m7",
        "\tid \\r",
    ]
    shown = json.loads(for_torchrun.read_text())["message"]["message"]
    assert shown == "rank 0: DataError: row \\x9b1m7"


ZERO = {"rollout/reward_min": 0.0, "rollout/reward_max": 0.0}


@pytest.mark.parametrize(
    ("before", "odd", "said", "agent"),
    [
        (
            {},
            {"rollout/tokens": 0},
            "  step 2 trained on nothing: the policy generated no token in any of its 256 "
            "completions; see the engines' logs in {logs}",
            None,
        ),
        (
            {},
            {"rollout/tokens": 0},
            "  step 2 trained on nothing: the policy generated no token in any of its 256 "
            "completions; check that rollout.agent loops:ask awaits ctx.generate",
            "loops:ask",
        ),
        (
            {"rollout/truncated_share": 0.96},
            {"rollout/truncated_share": 1.0, "rollout/completion_len_max": 1024},
            "  warning: no completion of step 2 ended with an end token, all 256 were truncated: "
            "raise rollout.max_new_tokens = 1024; if the model ends its turns with another token, "
            "add it to rollout.stop_token_ids",
            None,
        ),
        (
            {},
            {"rollout/truncated_share": 1.0},
            "  warning: no completion of step 2 ended with an end token, all 256 were truncated: "
            "raise pool.max_context_len, or give less between the turns of rollout.agent",
            "loops:ask",
        ),
        (
            ZERO | {"rollout/reward_max": 1.0},
            ZERO,
            "  warning: every reward of step 2 is 0; if `umbra samples",
            None,
        ),
    ],
    ids=["no tokens", "no tokens of a loop", "no ends", "full contexts", "no rewards"],
)
def test_a_step_that_teaches_nothing_is_reported_once(
    tmp_path: Path, before: dict[str, float], odd: dict[str, float], said: str, agent: str | None
) -> None:
    stream = io.StringIO()

    with ProgressDisplay(stream) as display:
        display.begin_steps("run", 0, 4)
        config = make_config(tmp_path)
        config = replace(config, rollout=replace(config.rollout, agent=agent))
        journal = RunReporter(config, display, None)
        for step, row in enumerate([before, odd, before, odd], 1):
            journal.step_done(step, ROW | row)
            journal.look_at_rollouts(config, step, ROW | row)

    (told,) = [line for line in stream.getvalue().splitlines() if not line.startswith("step ")]
    assert told.startswith(said.format(logs=tmp_path / "logs"))


# Of 32 prompts. A mean is rounded, also that of equal rewards.
MOST_EQUAL = {"rollout/zero_variance_groups": 25.0}
LEARNED = MOST_EQUAL | {"rollout/reward_mean": 0.9712}


@pytest.mark.parametrize(
    ("advantage", "rows", "is_told"),
    [
        ("grpo", [{}, *5 * [MOST_EQUAL]], True),
        ("maxrl", [{}, *5 * [MOST_EQUAL | ZERO | {"rollout/reward_mean": 1e-17}]], True),
        ("grpo", [*5 * [LEARNED], *4 * [MOST_EQUAL], {}, *4 * [MOST_EQUAL]], False),
        ("reinforce", 6 * [MOST_EQUAL], False),
        ("none", 6 * [MOST_EQUAL], False),
        ("mine:advantages", 6 * [MOST_EQUAL], False),
    ],
)
def test_steps_whose_prompts_mostly_teach_nothing_are_reported_once(
    tmp_path: Path, advantage: str, rows: list[dict[str, float]], is_told: bool
) -> None:
    stream = io.StringIO()

    with ProgressDisplay(stream) as display:
        display.begin_steps("run", 0, 20)
        config = make_config(tmp_path)
        config = replace(config, train=replace(config.train, advantage=advantage))
        journal = RunReporter(config, display, None)
        for step, row in enumerate([*rows, {}, *rows], 1):
            journal.look_at_rollouts(config, step, ROW | row)

    told = [line for line in stream.getvalue().splitlines() if "every reward" not in line]
    if not is_told:
        assert told == []
        return
    (line,) = told
    assert line.startswith(
        "  warning: in the steps 2 to 6, more than three quarters of the prompts"
    )
    assert advantage in line
    assert "rollout.drop_zero_variance_groups" in line


# -- the end -----------------------------------------------------------------------------


def recorded_in(report: Path) -> dict[str, Any]:
    """The answers that a report has for its page."""
    found = re.search(
        r'<script id="recorded" type="application/json">(.*)</script>', report.read_text()
    )
    assert found is not None
    return json.loads(found[1])


def test_the_end_leaves_summary_plot_and_report(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    record_settings(config, {})
    with MetricsLog(tmp_path, first_step=1) as log:
        journal = reporter(config, log)
        journal.evaluated(0, evaluation(0.25), is_last=False)
        for step in range(1, 5):
            journal.step_done(step, ROW | {"rollout/reward_mean": step / 4})
        journal.evaluated(4, evaluation(0.875), is_last=True)

    summary = finish(config, journal, steps=4, engine_restarts=1, stopped_by="")

    left_s = [
        row["time/left_s"]
        for row in read_metrics(tmp_path / "metrics.jsonl")
        if "time/left_s" in row
    ]
    assert (len(left_s), left_s[-1]) == (3, 0.0)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["accuracy_before"], written["accuracy_after"]) == (0.25, 0.875)
    assert (written["steps"], written["engine_restarts"]) == (4, 1)
    assert written["wall_s"] > 0
    assert (written["reward_first"], written["reward_last"]) == (0.25, 1.0)
    assert (tmp_path / "metrics.png").read_bytes()[:4] == b"\x89PNG"
    recorded = recorded_in(tmp_path / "report.html")
    state = recorded["api/state"]
    assert (state["name"], state["job"], state["summary"]) == ("a <test>", None, written)
    assert state["settings"]["train.export"] is False
    assert "rollout.group_size" not in state["settings"]
    assert [row["step"] for row in recorded["api/metrics?from=0"]["rows"]] == [0, 1, 2, 3, 4, 4]
    assert closing_lines(summary) == [
        f"done: 4 steps in {summary.wall_s:.1f} s with the start",
        "held-out accuracy 0.250 before, 0.875 after",
        "engines restarted: 1",
        *(f"{name}: {path}" for name, path in summary.files.items()),
    ]
    assert list(summary.files) == ["metrics", "report", "plot"]


def held_out(
    tokenizer: ModelTokenizer, prompt: str, *turns: str, num_more: int = 0
) -> dict[str, Any]:
    """A sample of an evaluation; each second turn was given."""
    tokens: list[int] = []
    segments: list[list[int]] = []
    for idx, turn in enumerate(turns):
        start = len(tokens)
        tokens += tokenizer.encode(turn)
        segments.append([start, len(tokens), -1 if idx % 2 else 7])
    return {
        "prompt_id": "p",
        "prompt_tokens": tokenizer.encode(prompt),
        "num_prompt_tokens": len(tokenizer.encode(prompt)) + num_more,
        "tokens": tokens,
        "num_tokens": len(tokens) + num_more,
        "segments": segments,
        "reward": 0.5,
        "finish_reason": "length",
    }


def test_the_report_shows_samples_of_each_evaluation_and_none_of_their_text_is_markup(
    tmp_path: Path,
) -> None:
    config, tokenizer = make_config(tmp_path), byte_tokenizer(tmp_path)
    with MetricsLog(tmp_path, first_step=1) as log:
        journal = reporter(config, log)
        journal.evaluated(0, evaluation(0.25, held_out(tokenizer, "2+2=", "before")), is_last=False)
        journal.step_done(1, ROW)
        journal.evaluated(1, evaluation(0.5, held_out(tokenizer, "2+2=", "lost")), is_last=False)
        journal.step_done(2, ROW)
        journal.evaluated(2, evaluation(0.5, held_out(tokenizer, "2+2=", "gone")), is_last=False)
    with MetricsLog(tmp_path, first_step=2) as log:  # resumes from the checkpoint of step 1
        journal = reporter(config, log)
        first = held_out(tokenizer, "2+2=", "<script>\x1b[2J", "tool: &", "4", num_more=9)
        journal.evaluated(1, evaluation(0.5, first), is_last=True)

    finish(config, journal, steps=1, engine_restarts=0, stopped_by="")

    assert (tmp_path / "report.html").read_text().count("<script") == 3
    rows = recorded_in(tmp_path / "report.html")["api/evaluations?from=0"]["rows"]
    (before,), (after,) = {row["step"]: row["samples"] for row in rows}.values()  # as the page does
    assert before["completion"] == "before"
    assert after["prompt"] == "[9 tokens before]\n2+2="
    assert after["completion"] == (
        "[policy] <script>\x1b[2J\n[given] tool: &\n[policy] 4\n[9 tokens after]"
    )


def test_a_stopped_run_leaves_a_summary_only(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    summary = finish(config, reporter(config), steps=2, engine_restarts=0, stopped_by="SIGTERM")

    assert summary.accuracy_after is None
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_by"] == "SIGTERM"
    assert not (tmp_path / "report.html").exists()
    lines = [
        f"stopped by SIGTERM after 2 steps in {summary.wall_s:.1f} s with the start",
        "to resume, start the same command again with run.resume=auto",
        f"metrics: {tmp_path / 'metrics.jsonl'}",
    ]
    assert closing_lines(summary) == lines
    assert closing_lines(replace(summary, steps=0))[1:] == lines[2:]


def test_steps_of_an_earlier_start_do_not_count_in_the_time_of_this_one(tmp_path: Path) -> None:
    journal = reporter(make_config(tmp_path), steps_before=40)

    summary = finish(
        make_config(tmp_path), journal, steps=44, engine_restarts=0, stopped_by="SIGTERM"
    )

    assert closing_lines(summary)[0].endswith(" s with the start (40 of them before this start)")
    assert json.loads((tmp_path / "summary.json").read_text())["steps_before"] == 40


def test_a_run_directory_given_for_a_model_is_an_error_with_the_models_path(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")

    with pytest.raises(DataError, match=f"that of the run's model is {tmp_path}/export"):
        read_model_config(tmp_path)


def test_a_held_out_loss_that_is_not_finite_is_shown_and_not_logged(tmp_path: Path) -> None:
    stream = io.StringIO()
    with MetricsLog(tmp_path, first_step=1) as log, ProgressDisplay(stream) as display:
        journal = RunReporter(make_config(tmp_path), display, log, steps_before=0)
        journal.evaluated_loss(0, 0.5, num_rows=3)
        journal.evaluated_loss(1, float("nan"), num_rows=3)

    assert [row["eval/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.5]
    assert "after step 1: loss nan on 3 held-out rows" in stream.getvalue()


def test_an_accuracy_is_shown_and_logged_with_its_interval(tmp_path: Path) -> None:
    stream = io.StringIO()
    with MetricsLog(tmp_path, first_step=1) as log, ProgressDisplay(stream) as display:
        journal = RunReporter(make_config(tmp_path), display, log, steps_before=0)

        row = journal.evaluated(0, evaluation(0.25), is_last=False)

    assert (row["eval/accuracy_low"], row["eval/accuracy_high"]) == (0.125, 0.375)
    assert read_metrics(tmp_path / "metrics.jsonl")[0].items() >= row.items()
    shown = "after step 0: accuracy 0.250 [0.125, 0.375] on 8 held-out prompts"
    assert shown in stream.getvalue()


def test_a_resumed_run_remembers_the_accuracy_before(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with MetricsLog(tmp_path, first_step=1) as log:
        reporter(config, log).evaluated(0, evaluation(0.25), is_last=False)

    with MetricsLog(tmp_path, first_step=3) as log:
        journal = reporter(config, log)
        journal.evaluated(2, evaluation(0.5), is_last=False)

    assert journal.accuracy_before == 0.25


def test_what_changed_since_the_last_start_is_known(tmp_path: Path) -> None:
    assert changed_settings(make_config(tmp_path)) == []
    again = replace(make_config(tmp_path), run=RunSection(dir=tmp_path, resume="auto"))
    again = replace(again, run=replace(again.run, name="a <test>"))
    first, other_order, fewer = (
        replace(again.model, lora=LoraSection(targets=targets))
        for targets in (("q_proj", "v_proj"), ("v_proj", "q_proj"), ("v_proj",))
    )
    record_settings(replace(make_config(tmp_path), model=first), {})
    again = replace(again, model=other_order)
    judge = AuxiliaryPoolSettings(model_path=Path("judge"), engine="echo")

    more = replace(again, train=replace(again.train, steps=9), pools={"judge": judge})
    more = replace(more, model=fewer)

    assert changed_settings(again) == []
    assert "train.steps = 9 (was 4)" in changed_settings(more)
    assert "pools.judge.engine = 'echo' (was None)" in changed_settings(more)
    was = "model.lora.targets = ['v_proj'] (was ['q_proj', 'v_proj'])"
    assert was in changed_settings(more)


def test_no_file_of_a_run_has_its_credentials(tmp_path: Path) -> None:
    judge = AuxiliaryPoolSettings(
        model_path=Path("judge"),
        env={"HF_TOKEN": "hf_secret", "OTHER": "hf_secret"},
        engine_args={"hf_token": "hf_secret", "inner": {"api-key": "hf_secret"}, "max_tokens": 5},
    )
    config = replace(make_config(tmp_path), pools={"judge": judge})

    record_settings(config, {})
    write_report(tmp_path / "report.html", tmp_path)

    recorded = (tmp_path / "settings.json").read_text()
    pool = json.loads(recorded)["settings"]["pools"]["judge"]
    assert "hf_secret" not in recorded + (tmp_path / "report.html").read_text()
    assert pool["env"] == {"HF_TOKEN": "***", "OTHER": "***"}
    assert pool["engine_args"] == {"hf_token": "***", "inner": {"api-key": "***"}, "max_tokens": 5}
    changed = " ".join(changed_settings(replace(config, pools={})))
    assert "pools.judge.env" in changed
    assert "hf_secret" not in changed


def test_without_a_first_evaluation_no_accuracy_before_is_claimed(tmp_path: Path) -> None:
    config = make_config(tmp_path, eval_at_start=False)
    with MetricsLog(tmp_path, first_step=1) as log:
        journal = reporter(config, log)
        journal.evaluated(2, evaluation(0.25), is_last=False)
        journal.step_done(4, ROW)
        journal.evaluated(4, evaluation(0.5), is_last=True)

    summary = finish(config, journal, steps=4, engine_restarts=0, stopped_by="")

    assert (summary.accuracy_before, summary.accuracy_after) == (None, 0.5)
    assert "held-out accuracy 0.500 after" in closing_lines(summary)


def test_reward_ends_are_means_of_a_tenth() -> None:
    rows = [{"step": float(i), "rollout/reward_mean": float(i)} for i in range(20)]

    assert reward_ends(rows) == (0.5, 18.5)
    assert reward_ends([{"step": 0.0, "eval/accuracy": 1.0}]) == (None, None)


# -- the directory -----------------------------------------------------------------------


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_checkpoints_on_another_disk_are_looked_at_before_the_start(
    tmp_path: Path, resume: str
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    run = RunSection(dir=tmp_path, resume=resume)
    check_run_dir(run, incarnation=1)

    (tmp_path / "disk").rmdir()  # as if it were not mounted

    with pytest.raises(RunDirectoryError, match=r"cannot write to .*/checkpoints: "):
        check_run_dir(run, incarnation=1)


def test_an_earlier_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)  # its save was interrupted

    said = r"holds an earlier run without a checkpoint: .*overwrite = true.*'auto' starts with step"
    with pytest.raises(ConfigError, match=said):
        check_run_dir(RunSection(dir=tmp_path), incarnation=1)

    write_checkpoint(tmp_path, step=2, version=3)
    said = r"holds an earlier run with the checkpoint step-000002: .*'auto'.*overwrite = true"
    with pytest.raises(ConfigError, match=said):
        check_run_dir(RunSection(dir=tmp_path), incarnation=1)

    check_run_dir(RunSection(dir=tmp_path, overwrite=True), incarnation=1)
    check_run_dir(RunSection(dir=tmp_path, resume="auto"), incarnation=1)
    check_run_dir(RunSection(dir=tmp_path), incarnation=2)


@pytest.mark.parametrize(
    ("recorded", "program"), [(0, "umbra.trainer"), (1, "umbra.trainer.sft")], ids=["RL", "SFT"]
)
def test_rl_resumes_no_run_of_sft_and_sft_none_of_rl(
    tmp_path: Path, recorded: int, program: str
) -> None:
    shared = {name: MINIMAL[name] for name in ("model", "data", "train")}
    configs = check_config(TrainerConfig, MINIMAL, "-"), check_config(SftConfig, shared, "-")
    fresh = [replace(each, run=RunSection(dir=tmp_path)) for each in configs]
    record_settings(fresh[recorded], {})
    check_kind(fresh[1 - recorded])

    named = str(tmp_path / "checkpoints" / "step-000002")
    for key, section in (
        ("run.dir", RunSection(dir=tmp_path, resume="auto")),
        ("run.resume", RunSection(dir=tmp_path / "new", resume=named)),
    ):
        resuming = [replace(each, run=section) for each in configs]
        check_kind(resuming[recorded])
        said = rf"{key}: {tmp_path} holds a run of {program}, .* = '{tmp_path}/export'"
        with pytest.raises(ConfigError, match=said):
            check_kind(resuming[1 - recorded])


def test_a_fresh_start_clears_what_an_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")

    assert begin_run(RunSection(dir=tmp_path, overwrite=True), incarnation=1) is None

    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "replaced"]
    with MetricsLog(tmp_path, first_step=1) as log:
        reporter(make_config(tmp_path), log).step_done(1, ROW)
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / "replaced").exists()


def test_an_earlier_run_outlives_any_number_of_starts_that_fail(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=2, version=3)
    (tmp_path / "metrics.jsonl").write_text("earlier")
    overwriting = RunSection(dir=tmp_path, overwrite=True)

    for _ in range(2):
        assert begin_run(overwriting, incarnation=1) is None
        assert begin_run(overwriting, incarnation=2) is None  # torchrun tries again
        (tmp_path / "metrics.jsonl").write_text("")  # and no step is done

    with pytest.raises(ConfigError, match=r"an earlier run in replaced/.*overwrite = true.*back"):
        check_run_dir(RunSection(dir=tmp_path), incarnation=1)
    kept = RunDir(RunDir(tmp_path).replaced)
    assert kept.metrics.read_text() == "earlier"
    assert [path.name for path in complete_checkpoints(kept.checkpoints)] == ["step-000002"]


def test_a_start_brings_back_the_export_that_a_killed_one_had_moved_away(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=2, version=3)
    for name, text in ((".export.old", "old"), (".export.new", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)

    begin_run(RunSection(dir=tmp_path, resume="auto"), incarnation=1)

    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "export"}
    assert (tmp_path / "export" / "config.json").read_text() == "old"


IDENTITY = ("settings.json", "tokenizers", "prompts.msgpack", "eval_prompts.msgpack")
"""What a resumed run is compared with."""


def write_identity(run_dir: Path) -> None:
    (run_dir / "tokenizers").mkdir()
    for name in IDENTITY:
        path = run_dir / name
        (path / "policy.json" if path.is_dir() else path).write_text("earlier")


def test_a_resume_before_the_first_checkpoint_keeps_what_it_is_compared_with(
    tmp_path: Path,
) -> None:
    write_identity(tmp_path)
    (tmp_path / "ledger").mkdir()
    (tmp_path / "metrics.jsonl").write_text("of steps that are repeated")

    assert begin_run(RunSection(dir=tmp_path, resume="auto"), incarnation=1) is None

    assert {path.name for path in tmp_path.iterdir()} == {"ledger", *IDENTITY}


def test_an_earlier_run_is_set_aside_with_what_a_resume_of_it_is_compared_with(
    tmp_path: Path,
) -> None:
    write_identity(tmp_path)

    begin_run(RunSection(dir=tmp_path, overwrite=True), incarnation=1)

    assert {path.name for path in (tmp_path / "replaced").iterdir()} == set(IDENTITY)


def test_auto_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    for name, complete in (("step-000002", True), ("step-000010", True), ("step-000012", False)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if complete:
            (tmp_path / "checkpoints" / name / "COMPLETE").touch()

    newest = tmp_path / "checkpoints" / "step-000010"
    assert begin_run(RunSection(dir=tmp_path, resume="auto"), incarnation=1) == newest
    assert begin_run(RunSection(dir=tmp_path), incarnation=2) == newest


def test_damaged_checkpoints_are_passed_over_and_none_left_is_refused(tmp_path: Path) -> None:
    older, newer = (write_checkpoint(tmp_path, step=step, version=step) for step in (2, 4))
    (tmp_path / "metrics.jsonl").write_text("kept")
    run = RunSection(dir=tmp_path, resume="auto")

    assert begin_run(run, incarnation=1, damaged=[newer]) == older
    with pytest.raises(RunDirectoryError, match=r"no checkpoint in .* is as it was written"):
        begin_run(run, incarnation=1, damaged=[newer, older])
    assert (tmp_path / "metrics.jsonl").read_text() == "kept"


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    named = write_checkpoint(tmp_path, step=2, version=2)
    run = RunSection(dir=tmp_path, resume=str(named))

    with pytest.raises(RunDirectoryError, match="step-000002 is not as it was written: name anoth"):
        begin_run(run, incarnation=1, damaged=[named])


def test_a_named_checkpoint_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step-9 does not exist"):
        begin_run(RunSection(dir=tmp_path, resume=str(tmp_path / "step-9")), incarnation=1)


def test_ranks_restarted_after_a_named_checkpoint_resume_from_newer_ones(
    tmp_path: Path,
) -> None:
    named = write_checkpoint(tmp_path, step=2, version=3)
    write_checkpoint(tmp_path, step=9, version=10)  # of the discarded history
    (tmp_path / "versions.jsonl").write_text('{"version": 11, "step": 10}\n')
    run = RunSection(dir=tmp_path, resume=str(named))

    assert begin_run(run, incarnation=1) == named
    assert begin_run(run, incarnation=2) == named
    newer = write_checkpoint(tmp_path, step=4, version=14)
    assert begin_run(run, incarnation=2) == newer
    assert begin_run(run, incarnation=3) == newer
    assert begin_run(run, incarnation=1) == named


def write_checkpoint(run_dir: Path, *, step: int, version: int) -> Path:
    """One without tensors."""
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    state = TrainerState(step=step, version=version, world_size=1, seed=0)
    (path / "trainer.json").write_text(json.dumps(asdict(state)))
    (path / "COMPLETE").touch()
    return path


def test_checkpoints_are_in_the_order_of_their_steps_and_others_do_not_count(
    tmp_path: Path,
) -> None:
    steps = [1_000_000, 999_995, 20, 10_000_000]
    for step in steps:
        write_checkpoint(tmp_path, step=step, version=step)
    folder = tmp_path / "checkpoints"
    (folder / "step-20000000-copy").mkdir()
    (folder / "step-20000000-copy" / "COMPLETE").touch()

    found = complete_checkpoints(folder)

    assert [read_trainer_state(path).step for path in found] == sorted(steps)
    newest = begin_run(RunSection(dir=tmp_path, resume="auto"), incarnation=1)
    assert newest == folder / "step-10000000"


def test_a_runs_own_checkpoint_is_known_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = RunDir(Path("runs/a"))

    for own in ("runs/a/checkpoints/step-1", f"{tmp_path}/runs/a/checkpoints/step-1"):
        assert place.holds(Path(own))
    assert place.holds(Path("runs/b/../a/checkpoints/step-1"))
    assert not place.holds(Path("runs/b/checkpoints/step-1"))


def test_versions_are_never_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    first = VersionCounter(path, newest_version(path), writes=True)
    assert [first.next(0), first.next(1), first.next(2)] == [1, 2, 3]
    with path.open("a") as file:
        file.write('{"version": 9')  # torn

    for expected in (4, 5):
        resumed = VersionCounter(path, newest_version(path), writes=True)
        assert resumed.next(1) == expected

    lines = path.read_text().splitlines()
    assert json.loads(lines[2]) == {"version": 3, "step": 2}
    assert json.loads(lines[-1]) == {"version": 5, "step": 1}


def write_a_step(log: MetricsLog, versions: VersionCounter, step: int) -> None:
    versions.next(step)
    log.write(step, {"train/loss": 0.5})


def test_files_of_a_run_directory_that_is_moved_stay_together(tmp_path: Path) -> None:
    run_dir, moved = tmp_path / "run", tmp_path / "moved"
    run_dir.mkdir()
    versions = VersionCounter(run_dir / "versions.jsonl", 0, writes=True)
    with MetricsLog(run_dir, first_step=1) as log:
        write_a_step(log, versions, 1)
        run_dir.rename(moved)
        write_a_step(log, versions, 2)

    assert [row["step"] for row in read_metrics(moved / "metrics.jsonl")] == [1, 2]
    assert newest_version(moved / "versions.jsonl") == 2
    assert not run_dir.exists()


@pytest.mark.parametrize("keeps_the_old_one", [False, True])
def test_metrics_go_to_the_file_that_an_editor_has_put_in_place(
    tmp_path: Path, keeps_the_old_one: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, first_step=1) as log:
        log.write(1, {})
        edited = tmp_path / "edited"
        edited.write_text(path.read_text().rstrip())  # without a newline at its end
        if keeps_the_old_one:
            path.rename(tmp_path / "metrics.jsonl~")
        edited.rename(path)

        log.write(2, {})
        found = [row["step"] for row in read_metrics(path)]
        path.unlink()
        log.write(3, {})

    assert found == [1, 2]
    assert [row["step"] for row in read_metrics(path)] == [3]


def test_a_run_directory_that_is_removed_is_noticed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    versions = VersionCounter(run_dir / "versions.jsonl", 0, writes=True)
    with MetricsLog(run_dir, first_step=1) as log:
        shutil.rmtree(run_dir)

        with pytest.raises(RunDirectoryError, match=r"run was removed while this run used it"):
            log.write(1, {})
        run_dir.mkdir()  # by whoever writes a log there
        with pytest.raises(RunDirectoryError, match=r"run was removed while this run used it"):
            versions.next(1)


def test_ranks_count_alike_however_far_rank_0_is(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    lead = VersionCounter(path, 7, writes=True)
    assert lead.next(0) == 8

    other = VersionCounter(path, 7, writes=False)

    assert other.next(0) == 8
    assert len(path.read_text().splitlines()) == 1


def test_a_directory_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(RunDirectoryError, match=r"file/run: a part of that path is a file"):
        check_writable(tmp_path / "file" / "run")


def test_a_full_disk_is_named_with_a_remedy() -> None:
    path = Path("/dev/full")

    with (
        pytest.raises(RunDirectoryError, match="cannot write /dev/full: the disk is full"),
        writing("write", path),
        path.open("w") as file,
    ):
        file.write("x")


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    (tmp_path / ".a.txt.new").write_text("half of what a killed process wrote, and longer")

    write_text(tmp_path / "a.txt", "new")

    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "new"


def test_the_age_of_this_process_is_known() -> None:
    assert 0 < process_age_s() < 3600 * 24


def test_a_folder_without_a_run_is_no_folder_to_replay(tmp_path: Path) -> None:
    said = r"settings\.json does not have the settings of a run \(No such file or directory\): give"
    with pytest.raises(ConfigError, match=said):
        recorded_config(tmp_path)


@pytest.mark.parametrize(("norm", "is_said"), [(1.50001, True), (1.51, False)])
def test_a_replay_whose_gradients_are_all_the_run_s_says_so(
    tmp_path: Path, norm: float, is_said: bool
) -> None:
    config, stream = make_config(tmp_path / "replay"), io.StringIO()
    (tmp_path / "run").mkdir()
    with MetricsLog(tmp_path / "run", first_step=1) as log:
        log.write(1, {"train/grad_norm": 2.5})
        log.write(2, {"train/grad_norm": 1.5})
    plan = ReplayPlan(
        run_dir=tmp_path / "run",
        first=1,
        last=2,
        overrides=["train.loss=cispo"],
        config=config,
        start=None,
        num_ranks=1,
    )
    report = ReplayReport(plan, ProgressDisplay(stream))

    report.begin()
    report.step_done(1, {"train/grad_norm": 2.5})
    report.step_done(2, {"train/grad_norm": norm})
    report.close()

    said = "note: all gradient norms are the run's. The optimizer's settings change those of later"
    assert (said in stream.getvalue()) is is_said


def test_the_models_of_a_run_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, advantage="gae")
    model, critic = replace(config.model, path=Path("a")), CriticSection(path=Path("models/b"))
    monkeypatch.chdir(tmp_path)
    record_settings(replace(config, model=model, critic=critic), {})
    monkeypatch.chdir("/")

    found = recorded_config(tmp_path)

    assert found.model.path == tmp_path / "a"
    assert found.critic.path == tmp_path / "models/b"


def test_a_file_system_without_locks_costs_the_lock_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:  # as on Lustre without `-o flock`
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)

    with RunLock(tmp_path):
        pass

    said = f"{tmp_path} is on a file system without locks (Function not implemented)"
    assert said in caplog.text
