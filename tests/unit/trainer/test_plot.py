"""Plots of a run's metrics, by `umbra plot` and at the run's end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.reports.run_metrics import PANELS
from umbra.trainer.reporting.metrics_plot import draw, panels


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


def test_rounding_errors_of_the_kl_look_like_zero() -> None:
    rows = [{"step": float(step), "train/reference_kl": step * 1e-9} for step in (-1, 1, 2)]

    (axes,) = draw(panels(rows), "run").axes

    assert axes.get_ylim() == (0.0, 1e-3)


def test_without_a_reference_model_there_is_no_panel_of_the_kl_and_one_evaluation_is_a_point() -> (
    None
):
    step = {"train/behaviour_kl": 1e-9, "train/entropy": 0.5, "rollout/truncated_share": 0.25}
    rows = [{"step": 0.0, "eval/accuracy": 0.5}, {"step": 1.0, **step}, {"step": 2.0, **step}]

    figure = draw(panels(rows), "run")

    assert [axes.get_ylabel() for axes in figure.axes] == ["Reward", "Truncated share", "Entropy"]
    (accuracy,) = figure.axes[0].lines
    assert (list(accuracy.get_xdata()), accuracy.get_marker()) == ([0.0], ".")
    assert accuracy.get_markersize() > 0


def test_an_evaluation_that_a_resumed_run_repeats_is_drawn_once() -> None:
    rows = [{"step": 1.0, "eval/accuracy": 0.5}, {"step": 2.0, "eval/accuracy": 0.6}]
    again = [{"step": 2.0, "eval/accuracy": 0.7}, {"step": 3.0, "eval/accuracy": 0.8}]

    ((accuracy,),) = [panel.series for panel in panels(rows + again)]

    assert (accuracy.steps, accuracy.values) == ([1, 2, 3], [0.5, 0.7, 0.8])


def test_each_part_of_the_steps_time_is_one_area_on_top_of_the_parts_before() -> None:
    (titles,) = [panel.series for panel in PANELS if panel.is_step_time]
    parts = dict(zip(titles, (3.0, 4.0, 1.0, 0.5), strict=True))
    rows = [{"step": float(step), "time/step_s": 10.0, **parts} for step in range(1, 101)]

    (axes,) = draw(panels(rows), "run").axes

    assert not axes.patches  # one for each step would take a minute in a long run
    areas = [area.get_datalim(axes.transData) for area in axes.collections]
    assert [(area.y0, area.y1) for area in areas] == [
        (0.0, 3.0),
        (3.0, 7.0),
        (7.0, 8.0),
        (8.0, 8.5),
        (8.5, 10.0),
    ]
    assert {(area.x0, area.x1) for area in areas} == {(0.5, 100.5)}


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
    (tmp_path / "a.png").mkdir()
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "a.png")]) == 2
    assert f"cannot write {tmp_path / 'a.png'}: a folder of that name" in capsys.readouterr().err
    below = tmp_path / "metrics.jsonl" / "x.png"
    assert main(["plot", str(tmp_path), "-o", str(below)]) == 2
    assert f"cannot write {below}: a part of that path is a file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not there
    assert main(["plot", str(tmp_path)]) == 2
    assert "pip install -e '.[plot]' in your clone" in capsys.readouterr().err
