"""The samples that the page lists, from a ledger that grows, is begun again, or goes back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from byte_tokenizer import byte_tokenizer
from ledger_samples import admitted, life_of_a_group, runs_of

from umbra.runtime.dash.sample_texts import Order, SampleIndex
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
        write(log, [Restored(0, 0, keep_newer=False)])
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
