"""What umbra changes in torchrun's own process."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from umbra.trainer.torchrun_plugin import prepare_torchrun

TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class SignalException(Exception):
    """Named like torchrun's, which only importing torch would bring."""


class RanksFailed(Exception):
    """Like torchrun's ChildFailedError."""

    def __init__(self, *codes: int) -> None:
        super().__init__(codes)
        self.failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}


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
@pytest.mark.parametrize("error", [SignalException("got 2"), RanksFailed(143, 143)])
def test_a_stop_ends_torchrun_without_a_stack(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_torchrun()

    sys.excepthook(type(error), error, None)

    assert capsys.readouterr().err == (
        "torchrun: ended by a stop; the lines above tell what was saved\n"
    )


@pytest.mark.usefixtures("of_the_trainer")
@pytest.mark.parametrize("error", [ValueError("broken"), RanksFailed(1, 143)])
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
