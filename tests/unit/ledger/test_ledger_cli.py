"""`umbra ledger` on an artificial ledger: counts, one sample's history, and errors."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from ledger_samples import admitted, life_of_a_group, runs_of

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.rollout.ledger.ledger_events import (
    Checkpoint,
    Cut,
    Dropped,
    Evaluated,
    Restored,
    Started,
    Version,
    encode_batches,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog

BEGAN_S = 1_700_000_000.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The manager had two incarnations, of which the second went back to the checkpoint."""
    with LedgerLog.open(ledger_folder(tmp_path, "m0"), "job-a", clock=lambda: BEGAN_S) as log:
        for idx, batch in enumerate([
            [Version(0, 0), Evaluated(0, 0.0, {"accuracy": 0.25, "samples": [{"reward": 1.0}]})],
            life_of_a_group(0, "a", 0, 0),
            [Version(1, 1), Checkpoint(1, 1), Evaluated(1, 0.0, {"accuracy": 0.5})],
            life_of_a_group(2, "b", 1, 1)[:2],
            [runs_of((2, 0, 1, [1]))],
            [runs_of((2, 1, 1, [2, 3]))],
            [Cut(uids_of(2, 3), "sync"), Version(2, 2), Started(uids_of(2))],
            [Evaluated(2, 0.0, {"accuracy": 0.75})],
            [runs_of((2, 3, 2, [4, 5]))],
            [admitted(4, "c"), Dropped(uids_of(4, 5), "too old", "of step 0")],
        ]):  # fmt: skip
            log.write(encode_batches(BEGAN_S + idx, batch))
    with LedgerLog.open(ledger_folder(tmp_path, "m0"), "job-b", clock=lambda: BEGAN_S + 60) as log:
        log.write(encode_batches(BEGAN_S + 61, [Cut(uids_of(2), "died"), Restored(1, 1)]))
        log.write(encode_batches(BEGAN_S + 62, [Evaluated(1, 0.0, {"accuracy": 0.5})]))
    return tmp_path


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["ledger", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_summary_counts_everything(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, str(run_dir))

    counts = {state: count for state, count in found["states"].items() if count}
    assert counts == {"partial": 2, "trained": 2, "dropped": 2}
    assert found["drop_reasons"] == {"too old": 2}
    assert found["totals"]["generated_tokens"] == 5 + 5
    assert found["totals"]["rolled_back_tokens"] == 2
    assert found["totals"]["interruptions"] == 3
    assert (found["steps_done"], found["covered_step"]) == (1, 1)
    assert [life["job_id"] for life in found["lives"]] == ["job-a", "job-b"]


def test_the_evaluations_of_the_surviving_history_are_listed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, str(run_dir))["evaluations"]

    assert found == [
        {
            "step": step,
            "temperature": 0.0,
            "time_s": BEGAN_S + seconds,
            "outcome": {"accuracy": accuracy},
        }
        for step, seconds, accuracy in ((0, 0, 0.25), (1, 62, 0.5))
    ]
    assert main(["ledger", str(run_dir)]) == 0
    assert "evaluations: 2, the last after step 1\n" in capsys.readouterr().out


def test_a_reader_that_has_enough_ends_it_quietly(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    with open(writing, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        status = main(["ledger", str(run_dir), "--json"])

    assert status == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_one_samples_story(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, str(run_dir), "--sample", "e0/b/0")

    assert (found["state"], found["num_tokens"], found["rolled_back_tokens"]) == ("partial", 3, 2)
    assert found["segments"] == [{"start": 0, "stop": 3, "version": 1}]
    story = [(row["event"], row["detail"], row["time_s"] - BEGAN_S) for row in found["history"]]
    assert story == [
        ("admitted", "index 2 in the data", 3),
        ("started", "", 3),
        ("tokens", "0 to 3, version 1, in 1.000 s", 4),
        ("cut", "sync", 6),
        ("started", "", 6),
        ("tokens", "3 to 5, version 2, in 0.000 s", 8),
        ("cut", "died", 61),
        ("rolled_back", "2 tokens of later versions cut off", 61),
    ]


def ids_of(found: dict[str, Any]) -> list[str]:
    return [row["sample_id"] for row in found["samples"]]


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        (["--state", "dropped"], ["e0/c/1", "e0/c/0"]),
        (["--state", "partial", "--samples"], ["e0/b/1", "e0/b/0"]),
        (["--step", "1"], ["e0/a/1", "e0/a/0"]),
        (["--step", "1", "--state", "dropped"], []),
        (["--step", "7"], []),
    ],
)
def test_samples_are_listed_by_state_and_step(
    run_dir: Path, capsys: pytest.CaptureFixture[str], chosen: list[str], ids: list[str]
) -> None:
    found = run_json(capsys, str(run_dir), *chosen)

    assert ids_of(found) == ids
    assert found["num_samples"] == len(ids)


def test_the_newest_samples_are_listed_with_what_one_wants_to_know(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, str(run_dir), "--newest", "3")
    assert (ids_of(found), found["num_samples"]) == (["e0/c/1", "e0/c/0", "e0/b/1"], 6)

    assert main(["ledger", str(run_dir), "--samples"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["sample", "state", "step", "reward", "tokens", "end"]
    assert len(rows) == 6
    assert rows[0].split(maxsplit=5) == ["e0/c/1", "dropped", "-", "-", "0", "too old: of step 0"]
    assert "  e0/a/1  trained  1     0       2       length" in rows

    assert main(["ledger", str(run_dir), "--newest", "1"]) == 0
    assert "the newest 1 of 6: --newest N lists N\n" in capsys.readouterr().out
    assert main(["ledger", str(run_dir), "--step", "7"]) == 0
    assert capsys.readouterr().out == "no such samples\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--state", "droped"], "no state 'droped': there are pending, running, partial,"),
        (["--sample", "e0/a/0", "--samples"], "--sample shows one sample"),
        (["--sample", "e0/a/0", "--step", "1"], "--sample shows one sample"),
    ],
)
def test_wrong_use_of_the_list_is_an_error(
    run_dir: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], said: str
) -> None:
    assert main(["ledger", str(run_dir), *wrong]) == 2

    assert said in capsys.readouterr().err


def test_a_trained_samples_story_ends_with_its_step(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, str(run_dir), "--sample", "e0/a/1")

    assert [row["event"] for row in found["history"]] == [
        "admitted", "started", "tokens", "finished", "scored", "leased", "trained",
    ]  # fmt: skip
    assert [row["detail"] for row in found["history"]][-2:] == ["for step 1", "in step 1"]
    assert (found["state"], found["step"], found["reward"]) == ("trained", 1, 0.0)


def test_text_for_people(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "  trained   2" in text
    assert "  too old  2" in text
    assert "rollout manager: 2 incarnations, the newest since 2023-11-1" in text

    assert main(["ledger", str(run_dir), "--sample", "e0/b/0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("e0/b/0: partial\n")
    assert "  0 to 3  version 1" in text
    assert "  cut          sync" in text


def test_control_characters_of_ids_and_reasons_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, reason = "\x1b[2Jé\n\x9b1m\u202e", "bad\x1b]0;title\x07"
    with LedgerLog.open(ledger_folder(tmp_path, "m0"), "job-a") as log:
        dropped = Dropped(uids_of(0, 1), reason, f"of {name}")
        log.write(encode_batches(BEGAN_S, [admitted(0, name), dropped]))

    statuses = [
        main(["ledger", str(tmp_path), *rest])
        for rest in ([], ["--samples"], ["--sample", f"e0/{name}/0"], ["--sample", f"e0/{name}"])
    ]

    output = capsys.readouterr()
    assert statuses == [0, 0, 0, 2]
    assert (output.out + output.err).replace("\n", "").isprintable()
    shown = r"e0/\x1b[2Jé\n\x9b1m\u202e"
    assert f"  {shown}/1  dropped" in output.out
    assert f"{shown}/0: dropped, " in output.out
    assert r"did you mean e0/\x1b[2Jé" in output.err
    assert run_json(capsys, str(tmp_path), "--samples")["samples"][0]["prompt_id"] == name


@pytest.mark.parametrize(
    ("sample_id", "hint"),
    [
        ("e0/b/7", "did you mean e0/b/0 or e0/b/1?"),
        ("e0/b", "did you mean e0/b/0 or e0/b/1?"),
        ("e0/bb/0", "did you mean e0/"),
        ("what", "has no sample 'what'"),
    ],
)
def test_an_unknown_sample_is_wrong_use_with_a_hint(
    run_dir: Path, capsys: pytest.CaptureFixture[str], sample_id: str, hint: str
) -> None:
    assert main(["ledger", str(run_dir), "--sample", sample_id]) == 2

    output = capsys.readouterr()
    assert hint in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("folder", "said"),
    [("", "has no ledger"), ("missing", "there is no folder"), ("file", "there is no folder")],
)
def test_a_folder_without_a_ledger_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, said: str
) -> None:
    (tmp_path / "file").write_text("")

    assert main(["ledger", str(tmp_path / folder)]) == 2

    assert said in capsys.readouterr().err


def test_damage_is_a_failure_that_names_its_position(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ledger_folder(run_dir, "m0") / "000001-0000.log"
    data = bytearray(path.read_bytes())
    data[80] ^= 255
    path.write_bytes(data)

    assert main(["ledger", str(run_dir)]) == 1

    error = capsys.readouterr().err
    assert str(path) in error
    assert "restore the file from a backup" in error
