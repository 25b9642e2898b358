"""What a stop waits for and would lose, and how torchrun ends by it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from umbra.trainer.torchrun_plugin import prepare_torchrun
from umbra.trainer.world.stop_forecast import StopForecast


class Run:
    """Steps and checkpoints of a run, at times of the test's own."""

    def __init__(self, step: int = 0, given_grace_s: float | None = None) -> None:
        self.now = 0.0
        self.shown: list[str] = []
        self.forecast = StopForecast(step, given_grace_s, self.shown.append, lambda: self.now)

    def train(self, seconds: float) -> None:
        with self.forecast.training():
            self.now += seconds

    def save(self, seconds: float) -> None:
        complete = self.forecast.saving()
        self.now += seconds
        complete()


def test_a_stop_names_the_end_of_the_step_from_the_time_that_steps_took() -> None:
    run = Run(step=8)
    run.train(60.0)
    run.train(50.0)

    with run.forecast.training():
        run.now += 19.0
        run.forecast.announce("SIGINT")
        assert run.forecast.loss() == "steps 9 to 11 are lost; the newest checkpoint is of step 8"

    assert run.shown == [
        "SIGINT: step 11 ends in about 41 s; then a checkpoint is written. Ctrl-C again ends the "
        "run at once: steps 9 to 11 are lost; the newest checkpoint is of step 8"
    ]


def test_a_stop_in_the_first_step_does_not_foretell_its_end() -> None:
    run = Run()

    with run.forecast.training():
        run.forecast.announce("SIGTERM")

    assert run.shown == [
        "SIGTERM: step 1 has to end, and no step has been timed yet; then a checkpoint is written."
    ]


def test_a_stop_outside_of_a_step_writes_the_checkpoint_if_there_is_something_new() -> None:
    run = Run()
    run.train(1.0)
    run.forecast.announce("SIGTERM")
    complete = run.forecast.saving()
    run.forecast.announce("umbra stop")
    assert run.forecast.loss() == "step 1 is lost; there is no checkpoint"
    complete()
    run.forecast.announce("SIGTERM")

    assert run.forecast.loss() == ""
    assert run.shown == [
        "SIGTERM: writing the checkpoint of step 1.",
        "umbra stop: writing the checkpoint of step 1.",
        "SIGTERM: ending what is in progress; there is no new step to save.",
    ]


def test_a_checkpoint_covers_the_steps_before_it_began() -> None:
    run = Run()
    run.train(1.0)
    complete = run.forecast.saving()
    run.train(1.0)
    with run.forecast.training():
        complete()

        assert run.forecast.loss() == "steps 2 to 3 are lost; the newest checkpoint is of step 1"


def test_the_grace_of_a_signal_is_measured_unless_it_is_given_and_ctrl_c_has_no_limit() -> None:
    run = Run()
    assert run.forecast.grace_s(signal.SIGTERM) == 5.0
    run.train(60.0)
    assert run.forecast.grace_s(signal.SIGTERM) == 2 * (60.0 + 30.0)
    run.save(10.0)
    run.train(40.0)

    assert run.forecast.grace_s(signal.SIGHUP) == 2 * (60.0 + 10.0)
    assert Run(given_grace_s=7.0).forecast.grace_s(signal.SIGTERM) == 7.0
    assert run.forecast.grace_s(signal.SIGINT) == math.inf


def test_a_step_that_failed_is_not_counted() -> None:
    run = Run()

    with pytest.raises(ValueError, match="broken"), run.forecast.training():
        raise ValueError("broken")

    assert run.forecast.loss() == ""
    assert run.forecast.grace_s(signal.SIGTERM) == 5.0


TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class SignalException(Exception):
    """Named like torchrun's, which only importing torch would bring."""


class RanksFailed(Exception):
    """Like torchrun's ChildFailedError. Each rank has an exit code and perhaps the error that it
    reported; the last rank failed first."""

    def __init__(self, *ranks: tuple[int, str]) -> None:
        super().__init__(ranks)
        self.failures = {
            rank: SimpleNamespace(
                exitcode=code,
                timestamp=-rank,
                message={"message": error} if error else "To enable traceback see: https:",
            )
            for rank, (code, error) in enumerate(ranks)
        }


@pytest.fixture
def of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrun", "-m", "umbra.trainer", "train.toml"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv(TIMEOUT, "")  # so that it is gone afterwards
    monkeypatch.delenv(TIMEOUT)


@pytest.mark.usefixtures("of_the_trainer")
def test_torchrun_waits_for_ranks_as_long_as_their_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare_torchrun()
    assert int(os.environ[TIMEOUT]) >= 24 * 3600

    monkeypatch.setenv(TIMEOUT, "40")
    prepare_torchrun()
    assert os.environ[TIMEOUT] == "40"


@pytest.mark.usefixtures("of_the_trainer")
@pytest.mark.slow
@pytest.mark.parametrize("module", ["umbra.trainer", "umbra.trainer.replay"])
def test_ranks_of_one_machine_meet_whatever_its_name_resolves_to(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    prepare_torchrun()
    assert "PET_LOCAL_ADDR" not in os.environ  # other machines may need the name

    monkeypatch.setattr(sys, "argv", ["torchrun", "--standalone", "-m", module, "umbra.toml"])
    prepare_torchrun()
    # In a process of its own, because torch's import takes seconds.
    program = "from torch.distributed.run import parse_args as p; print(p(['x.py']).local_addr)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "localhost\n"

    monkeypatch.setenv("PET_LOCAL_ADDR", "10.0.0.7")
    prepare_torchrun()
    assert os.environ["PET_LOCAL_ADDR"] == "10.0.0.7"


@pytest.mark.usefixtures("of_the_trainer")
@pytest.mark.parametrize("error", [SignalException("got 2"), RanksFailed((143, ""), (143, ""))])
def test_a_stop_ends_torchrun_without_a_stack(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_torchrun()

    sys.excepthook(type(error), error, None)

    assert capsys.readouterr().err == (
        "torchrun: ended by a stop; the lines above say what was saved\n"
    )


@pytest.mark.usefixtures("of_the_trainer")
@pytest.mark.parametrize("first", [(1, "rank 1: ConfigError: steps is 0"), (-signal.SIGKILL, "")])
def test_the_first_error_that_a_rank_reported_is_the_last_line(
    first: tuple[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that was killed reported none, but the others name it."""
    prepare_torchrun()
    error = RanksFailed((1, "rank 0: JobFailed: rank 1 failed"), first)

    sys.excepthook(type(error), error, None)

    last = first[1] or "rank 0: JobFailed: rank 1 failed"
    assert capsys.readouterr().err == f"torchrun: {last}\n"


@pytest.mark.usefixtures("of_the_trainer")
@pytest.mark.parametrize("error", [ValueError("broken"), RanksFailed((143, ""), (1, ""))])
def test_any_other_end_keeps_its_stack(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_torchrun()

    sys.excepthook(type(error), error, None)

    assert type(error).__name__ in capsys.readouterr().err


@pytest.mark.usefixtures("of_the_trainer")
def test_torchrun_with_another_program_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrun", "train.py"])
    before = sys.excepthook

    prepare_torchrun()

    assert sys.excepthook is before
    assert TIMEOUT not in os.environ
