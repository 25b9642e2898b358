"""The samples of a run can be read as text, while it trains and afterwards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_assets import write_rows
from whole_runs import START_LIMIT_S, start_run

from umbra.runtime.cli.umbra_command import main

pytestmark = [pytest.mark.process, pytest.mark.slow]

SETTINGS = (
    "rollout.agent=tool_loop:run",
    "reward.function=tool_loop:by_answer",
    "data.eval=eval.jsonl",
    "data.shuffle=false",
    "train.steps=6",
)


def test_samples_of_an_agent_loop_are_shown_while_it_trains_and_in_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"all {number}=", "answer": str(number)} for number in range(8)]
    write_rows(folder / "eval.jsonl", rows)

    def samples(*choice: str) -> list[dict[str, Any]]:
        assert main(["samples", str(run.run_dir), *choice, "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["samples"]
        return found

    with start_run(folder, *SETTINGS, num_ranks=0) as run:
        run.wait_for_step(2)
        in_training = samples("--step", "1", "--worst", "1") + samples("--step", "2", "--best", "1")
        ended = run.wait(START_LIMIT_S)

    assert ended.status == 0, ended.output
    assert [sample["reward"] for sample in in_training] == [0.0, 7.0]
    for sample, answer in zip(in_training, ("0", "7"), strict=True):
        assert sample["prompt"] == f"all {int(answer):05d}="
        first, tool, second = sample["turns"]
        assert tool["text"] == f"tool {answer}"
        assert tool["versions"] == []
        assert first["versions"] == second["versions"] == [sample["step"]]
        assert [(turn["stop"], turn["finish_reason"]) for turn in sample["turns"]] == [
            (3, "length"), (9, ""), (12, "length")
        ]  # fmt: skip
        assert sample["recorded"] == {"tool": f"tool {answer}"}
    afterwards = samples(*[sample["sample_id"] for sample in in_training])
    assert [sample["turns"] for sample in afterwards] == [s["turns"] for s in in_training]
    assert {sample["state"] for sample in afterwards} == {"trained"}
    check_report((run.run_dir / "report.html").read_text())


def check_report(page: str) -> None:
    """It has the worst and the best held-out prompts of both evaluations, and training samples."""
    found = re.search(r'<script id="recorded" type="application/json">(.*)</script>', page)
    assert found is not None
    recorded = json.loads(found[1])
    evaluations = recorded["api/evaluations?from=0"]["rows"]
    assert len(evaluations) == 2
    shown = (0, 1, 2, 5, 6, 7)
    for evaluation in evaluations:
        samples = evaluation["samples"]
        assert [sample["prompt"] for sample in samples] == [f"all {number}=" for number in shown]
        text = "".join(sample["completion"] for sample in samples)
        assert re.findall(r"\[given\] (tool \d)", text) == [f"tool {number}" for number in shown]
        assert text.count("[policy]") == 12
    best = recorded["api/samples?order=best"]["samples"]
    assert len(best) == 10
    tool = f"tool {best[0]['reward']:.0f}"
    assert recorded[f"api/sample/{best[0]['sample_id']}"]["turns"][1]["text"] == tool
