"""Plots of a run's metrics, by `umbra plot` and at the run's end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_training_runs import run, write_config
from training_models import save_model

from umbra.runtime.cli.umbra_command import main
from umbra.trainer.reporting.metrics_log import read_metrics
from umbra.trainer.reporting.metrics_plot import draw, panels


@pytest.mark.process
@pytest.mark.slow
def test_a_runs_reward_kl_time_and_memory_are_drawn(tmp_path: Path) -> None:
    save_model(tmp_path / "model", initializer_range=0.02)
    for name in ("train", "eval"):
        rows = [{"prompt": f"{name} {idx}=", "answer": "low"} for idx in range(16)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(write_config(tmp_path), 1, "train.steps=3", "train.kl_coef=0.01")
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    steps = [row for row in metrics if "time/step_s" in row]

    found = panels(metrics)
    axes = draw(found, "run").axes

    assert [panel.title for panel in found] == [axis.get_ylabel() for axis in axes]
    labels = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in axes]
    phases = ("sync", "generation", "train")
    assert labels == [
        ["training reward", "held-out accuracy"],
        ["from what sampled the tokens", "from the starting model"],
        ["rollout", "sync", "sleep", "train", "other"],
        [f"{phase}, {what}" for phase in phases for what in ("peak", "allocated")],
    ]
    reward, accuracy = axes[0].lines
    assert list(reward.get_xdata()) == [1, 2, 3]
    assert list(reward.get_ydata()) == [row["rollout/reward_mean"] for row in steps]
    assert accuracy.get_xdata()[0] == 0
    bars = axes[2].containers
    tops = [bar.get_y() + bar.get_height() for bar in bars[-1]]
    assert tops == pytest.approx([row["time/step_s"] for row in steps])
    rollout = [bar.get_height() for bar in bars[0]]
    assert rollout == [row["time/rollout_s"] for row in steps]


def write_metrics(folder: Path) -> None:
    rows = [{"step": 1, "rollout/reward_mean": 0.5}, {"step": 2, "rollout/reward_mean": 0.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("x.svg", b"<?xml"), ("x.png", b"\x89PNG")])
def test_the_picture_has_the_format_of_its_suffix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, start: bytes
) -> None:
    write_metrics(tmp_path)

    assert main(["plot", str(tmp_path), "-o", str(tmp_path / name)]) == 0

    assert capsys.readouterr().out == f"{tmp_path / name}\n"
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_run_that_measured_nothing_has_a_picture_without_panels() -> None:
    assert draw(panels([]), "run").axes == []


def test_a_plot_that_cannot_be_drawn_is_an_error_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plot", str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}: give" in capsys.readouterr().err
    assert main(["plot", str(tmp_path)]) == 2
    assert "is not a run's folder, it has no metrics.jsonl: give" in capsys.readouterr().err
    damaged = b'{"step": 1}\n[1]\n2\n{"eval/accuracy": 0.5}\n{"time": \xff'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    assert main(["plot", str(tmp_path)]) == 2
    assert "has no metrics yet" in capsys.readouterr().err
    write_metrics(tmp_path)
    assert main(["plot", str(tmp_path), "-o", "x.bmp"]) == 2
    assert ".svg, .png, .pdf" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "none/x.png")]) == 2
    assert "No such file or directory: choose another file with -o" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not there
    assert main(["plot", str(tmp_path)]) == 2
    assert "pip install -e '.[plot]' in your clone" in capsys.readouterr().err
