"""What the dash page reads of a run: its files, and samples as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from ledger_samples import admitted, life_of_a_group, runs_of

from umbra.runtime.dash.run_view import JsonLines, RunView
from umbra.runtime.dash.sample_texts import Order, SampleIndex
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_events import (
    Checkpoint,
    Event,
    Finished,
    Restored,
    Scored,
    Started,
    Version,
    encode_batches,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.prompts import write_prompts


def write(log: LedgerLog, events: Sequence[Event]) -> None:
    for event in events:
        log.write(encode_batches(0.0, [event]))


def ids(index: SampleIndex, order: Order = "newest", step: int | None = None) -> list[str]:
    index.refresh()
    return [sample["sample_id"] for sample in index.choose(order, 10, step)[0]]


def test_samples_appear_as_the_ledger_grows_and_none_is_lost_when_it_is_begun_again(
    tmp_path: Path,
) -> None:
    index = SampleIndex(tmp_path)
    assert ids(index) == []
    # Parts as small as this: each batch begins a new file.
    with LedgerLog.open(ledger_folder(tmp_path, "rollouts"), "job", part_nbytes=1) as log:
        write(log, [Version(0, 0), *life_of_a_group(0, "a", 0, 0)])
        assert ids(index) == ["e0/a/1", "e0/a/0"]
        write(log, [Version(1, 1), *life_of_a_group(2, "b", 1, 1)])
        assert ids(index, step=2) == ["e0/b/1", "e0/b/0"]
        assert ids(index, "best", step=1) == ["e0/a/0", "e0/a/1"]
        assert ids(index, "worst") == ["e0/b/1", "e0/a/1", "e0/b/0", "e0/a/0"]
        write(log, [Checkpoint(1, 1)])
        index.refresh()
        states = [sample["state"] for sample in index.choose("newest", 10)[0]]
        assert states == ["in training", "in training", "trained", "trained"]
    with LedgerLog.open(ledger_folder(tmp_path, "rollouts"), "job") as log:
        assert len(ids(index)) == 4
        write(log, [Restored(0, 0)])
        assert ids(index, step=1) == []
        assert len(ids(index)) == 2


def test_a_text_is_read_from_the_frames_of_its_sample(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    prompts: list[dict[str, Any]] = [
        {"id": name, "prompt": text, "tokens": np.asarray(tokenizer.encode(text), "<i4").tobytes(),
         "row": {}}
        for name, text in (("a", "2+2="), ("b", "3+3="))
    ]  # fmt: skip
    write_prompts(tmp_path / "prompts.msgpack", prompts)
    both = uids_of(0, 1)
    index = SampleIndex(tmp_path)
    with LedgerLog.open(ledger_folder(tmp_path, "rollouts"), "job") as log:
        write(log, [Version(0, 0), Version(1, 1), admitted(0, "b"), Started(both)])
        write(
            log,
            [
                runs_of((1, 0, 0, tokenizer.encode("no"))),
                runs_of((0, 0, 0, tokenizer.encode("si"))),
            ],
        )
        index.refresh()
        unfinished = index.sample("e0/b/0")
        write(log, [runs_of((0, 2, 1, tokenizer.encode("x!"))), Finished(both, ["stop", "length"])])
        write(log, [Scored(both, np.asarray([1.0, 0.0]))])
        index.refresh()

    found = index.sample("e0/b/0")

    assert (unfinished["state"], unfinished["turns"][0]["text"]) == ("is being generated", "si")
    assert found["prompt"] == "3+3="
    assert [(turn["text"], turn["versions"]) for turn in found["turns"]] == [("six!", (0, 1))]
    assert (found["state"], found["reward"], found["versions"]) == (
        "waits for its step",
        1.0,
        [0, 1],
    )


def test_files_that_cannot_be_read_are_an_error_only_for_who_asks_for_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "ledger").symlink_to("ledger")
    (tmp_path / "settings.json").write_text("[]")
    view = RunView(tmp_path)

    asyncio.run(view.read_ahead())

    for reading in (view.metrics(0), view.samples("newest", None)):
        with pytest.raises(OSError, match=str(tmp_path)):
            asyncio.run(reading)
    assert '"steps": null' in asyncio.run(view.state())


def test_a_run_directory_that_was_removed_is_reported_as_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the run directory {tmp_path}/run is gone"):
        asyncio.run(RunView(tmp_path / "run").state())


@pytest.mark.parametrize("measured", ["eval/accuracy", "eval/loss"])
def test_a_page_gets_evaluations_that_come_after_later_steps_and_all_of_a_long_run(
    tmp_path: Path, measured: str
) -> None:
    """Those beside training come late, and of many rows only some are sent."""
    rows = [{"step": step} for step in range(1, 9000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    view = RunView(tmp_path)
    seen = json.loads(asyncio.run(view.metrics(0)))
    evaluated = [{"step": step, measured: 0.5} for step in (8998, 8999)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in evaluated)

    new = json.loads(asyncio.run(view.metrics(seen["num_rows"])))
    whole = json.loads(asyncio.run(view.metrics(0)))["rows"]

    assert new["rows"] == evaluated
    assert len(whole) < len(rows)
    assert [row for row in whole if measured in row] == evaluated


def test_lines_are_read_once_and_from_the_beginning_if_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, ("step",))
    lines.read_on()
    assert lines.rows == []

    path.write_text('{"step": 1}\n{"step": 2, "loss": NaN}\n{"st')
    lines.read_on()
    assert lines.rows == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\nnot JSON\n[4]\n')
    lines.read_on()
    lines.read_on()
    assert lines.encoded == ['{"step": 1}', '{"step": 2, "loss": null}', '{"step": 3}']
    assert lines.times_replaced == 0

    (tmp_path / "new").write_text('{"step": 1}\n{"step": 2}\n{"step": 5}\n{"step": 6}\n')
    (tmp_path / "new").replace(path)
    lines.read_on()
    assert [row["step"] for row in lines.rows] == [1, 2, 5, 6]
    assert lines.times_replaced == 1
