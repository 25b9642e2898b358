"""What processes record, how much of it is kept, and how it becomes a timeline."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from trace_event_format import check_timeline, read_timeline, spans_of

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.errors import ConfigError
from umbra.runtime.tracing.spans import (
    QUEUE_LEN,
    Recording,
    gauge,
    instant,
    past_span,
    recording,
    set_recording,
    span,
)
from umbra.runtime.tracing.trace_files import TraceFiles, trace_json


def write_file(run_dir: Path, name: str, header: object, events: Sequence[object]) -> None:
    (run_dir / "trace").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in (header, events))
    (run_dir / "trace" / f"{name}.jsonl").write_text(text)


def header(process: str, node: str = "n", *, monotonic_ns: int = 0, time_ns: int = 0) -> object:
    clocks = {"boot_id": node, "monotonic_ns": monotonic_ns, "time_ns": time_ns}
    return {"node": node, "process": process, "pid": 1, **clocks}


def steps(*numbers: int) -> list[object]:
    """Steps of one second, with a pause of one second after each."""
    return [
        ["X", idx * 2_000_000_000, 1_000_000_000, "", "step", {"step": number}]
        for idx, number in enumerate(numbers)
    ]


def timeline(run_dir: Path) -> list[dict[str, Any]]:
    events = trace_json(TraceFiles(run_dir).events())
    check_timeline(events)
    return events


def test_what_a_process_records_becomes_a_timeline(tmp_path: Path) -> None:
    with recording(str(tmp_path / "trace"), "n", "rank-0"):
        gauge("queue", lambda: {"len": 3})
        began_s = time.monotonic()
        with span("step", step=1), suppress(ValueError), span("train") as train:
            instant("news", what="nothing")
            raise ValueError
        past_span("group", began_s, overlaps=True)
        past_span("group", began_s, overlaps=True)

    (outer,) = spans_of(timeline(tmp_path), "rank-0", "step")
    (inner,) = spans_of(timeline(tmp_path), "rank-0", "train")
    others = {e["name"]: (e["ph"], e["args"]) for e in timeline(tmp_path) if e["ph"] in "iC"}
    assert outer["args"] == {"step": 1}
    assert inner["args"] == {"error": "ValueError"}
    assert inner["dur"] == pytest.approx(train.seconds * 1e6)
    assert len(spans_of(timeline(tmp_path), "rank-0", "group")) == 2
    assert others == {"news": ("i", {"what": "nothing"}), "queue": ("C", {"len": 3})}


def test_without_recording_spans_only_measure(tmp_path: Path) -> None:
    with recording("", "n", "rank-0"), span("train") as train:
        instant("news")

    assert train.seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_events_that_nobody_writes_are_bounded() -> None:
    queue = Recording()
    set_recording(queue)
    try:
        for idx in range(QUEUE_LEN + 10):
            instant("event", idx=idx)
    finally:
        set_recording(None)

    assert [len(queue.events), queue.events[0].args["idx"]] == [QUEUE_LEN, 10]


def test_a_process_that_starts_again_and_again_keeps_its_newest_events(tmp_path: Path) -> None:
    for start in range(30):
        with recording(str(tmp_path / "trace"), "n", "policy-0", max_file_nbytes=2000):
            for _ in range(5):
                instant("start", number=start)

    paths = sorted((tmp_path / "trace").iterdir())
    kept = {int(event.args["number"]) for _, event in TraceFiles(tmp_path).events()}
    assert [path.name for path in paths] == ["n.policy-0.jsonl", "n.policy-0.old.jsonl"]
    assert all(path.stat().st_size < 2500 for path in paths)
    assert kept == set(range(min(kept), 30))
    assert len(kept) > 1


@pytest.mark.parametrize("torn", ['[["X",100', '{"node": "n", "proc'])
def test_a_line_that_a_kill_tore_is_left_out(tmp_path: Path, torn: str) -> None:
    write_file(tmp_path, "n.rank-0", header("rank-0"), steps(1))
    path = tmp_path / "trace" / "n.rank-0.jsonl"
    path.write_text(path.read_text() + torn)

    with recording(str(tmp_path / "trace"), "n", "rank-0"):
        instant("second start")

    names = [event.name for _, event in TraceFiles(tmp_path).events()]
    assert names == ["step", "second start"]


def test_a_full_disk_ends_the_trace_and_not_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").write_text("a file, not a folder")

    with caplog.at_level(logging.WARNING), recording(str(tmp_path / "trace"), "n", "rank-0"):
        instant("news")

    assert "the trace ends here: cannot write" in caplog.text
    assert "trace" not in {thread.name for thread in threading.enumerate()}


def test_nodes_are_aligned_by_their_wall_clocks(tmp_path: Path) -> None:
    sync: list[object] = [["X", 1_000, 8_000, "", "sync", {"version": 7}]]
    load: list[object] = [["X", 501_000, 2_000, "", "load weights", {"version": 7}]]
    write_file(tmp_path, "a.rank-0", header("rank-0", "a", time_ns=10_000), sync)
    clocks = {"monotonic_ns": 500_000, "time_ns": 13_000}
    write_file(tmp_path, "b.policy-0", header("policy-0", "b", **clocks), load)

    events = timeline(tmp_path)

    (one,) = spans_of(events, "rank-0 (a)", "sync")
    (other,) = spans_of(events, "policy-0 (b)", "load weights")
    arrow = [(e["ph"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert [one["ts"], other["ts"]] == [0.0, 3.0]
    assert arrow == [("s", 0.0), ("f", 3.0)]


def test_the_newest_steps_of_a_resumed_run_count(tmp_path: Path) -> None:
    write_file(tmp_path, "n.rank-0", header("rank-0"), steps(1, 2, 3, 2, 3, 4))
    files = TraceFiles(tmp_path)

    window = files.find_steps(2, 3)

    assert window == (6_000_000_000, 10_000_000_000)
    assert [int(event.args["step"]) for _, event in files.events(window)] == [2, 3]


def test_steps_that_are_not_kept_are_an_error_that_names_the_others(tmp_path: Path) -> None:
    write_file(tmp_path, "n.rank-0", header("rank-0"), steps(5, 6, 7))

    with pytest.raises(ConfigError, match=r"the trace has the steps 5:7, but not step 4"):
        TraceFiles(tmp_path).find_steps(4, 6)
    with pytest.raises(ConfigError, match=r"but not step 8"):
        TraceFiles(tmp_path).find_steps(7, 1 << 62)


def test_the_command_writes_the_steps_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no trace: give the run.dir of a run that was" in capsys.readouterr().err
    write_file(tmp_path, "n.rank-0", header("rank-0"), steps(1, 2, 3))

    assert main(["trace", str(tmp_path), "--steps", "2:3"]) == 0

    path = tmp_path / "trace" / "steps-2-3.json.gz"
    assert capsys.readouterr().out == f"{path}: open it at https://ui.perfetto.dev\n"
    assert [e["args"]["step"] for e in spans_of(read_timeline(path), "rank-0", "step")] == [2, 3]


def test_a_file_of_the_command_is_what_its_name_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(tmp_path, "n.rank-0", header("rank-0"), steps(1, 2))
    plain, compressed = tmp_path / "new" / "x.json", tmp_path / "x.json.gz"

    assert main(["trace", str(tmp_path), "-o", str(plain)]) == 0
    assert main(["trace", str(tmp_path), "-o", str(compressed)]) == 0
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 2

    assert json.loads(plain.read_text())["traceEvents"] == read_timeline(compressed)
    assert "x.html: end the name with .json or .json.gz" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "-o", str(plain / "x.json")]) == 2
    assert f"cannot write {plain / 'x.json'}: a part of that path is a" in capsys.readouterr().err
