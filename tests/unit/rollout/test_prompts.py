from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.manager.admission import PromptOrder, epoch_order, trajectory_seed
from umbra.runtime.rollout.prompts import PromptSet, to_row, write_prompts
from umbra.runtime.rpc.wire import CALL, Decoder, Encoder


def record(prompt_id: str, tokens: list[int], **row: Any) -> dict[str, Any]:
    data = np.asarray(tokens, "<i4").tobytes()
    return {"id": prompt_id, "prompt": f"text of {prompt_id}", "tokens": data, "row": row}


def test_prompts_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "prompts.msgpack"
    rows = [record("a", [1, 2, 70_000], answer="x"), record("b", [3], answer=["y", {"z": 1.5}])]

    assert write_prompts(path, rows) == 2
    prompts = PromptSet.open(path)

    assert len(prompts) == 2
    assert prompts[0].tokens.tolist() == [1, 2, 70_000]
    assert prompts[1].text == "text of b"
    assert prompts[1].row == {"answer": ["y", {"z": 1.5}]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompts.msgpack"]
    prompts.close()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "without prompts"),
        ([record("a", [1]), record("a", [2])], "'a' occurs twice"),
        ([record("a", [])], "'a' is empty"),
        ([record("a", [1], when=object())], "column 'when' cannot be encoded"),
    ],
)
def test_bad_prompts_are_refused_and_leave_no_file(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    path = tmp_path / "prompts.msgpack"

    with pytest.raises(DataError, match=message):
        write_prompts(path, rows)

    assert list(tmp_path.iterdir()) == []


def test_a_row_that_is_written_can_be_sent_to_be_scored(tmp_path: Path) -> None:
    def nested(depth: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return record("a", [1], deep=value)

    path = tmp_path / "prompts.msgpack"
    written: list[int] = []
    for depth in range(990, 1030):
        with contextlib.suppress(DataError):
            write_prompts(path, [nested(depth)])
            written.append(depth)
    prompts = PromptSet.open(path)
    item = {"sample_id": "a", "prompt": "", "row": prompts[0].row, "manager": "m"}
    scored: Any = to_row(prompts[0].to_score()["row"])["deep"]
    prompts.close()
    call: list[Any] = [CALL, 1, 1, "run_agent", [item], {}, 1000, 0]
    received: Any = next(Decoder().decode(*Encoder().encode(call)))[4][0]["row"]["deep"]

    assert 990 < max(written) < 1029, "some are written, others refused"
    for _ in range(max(written)):  # Python cannot compare them whole
        (received,), (scored,) = received, scored
    assert (received, scored) == (1, 1)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.msgpack"
    with pytest.raises(DataError, match=r"prompts\.msgpack cannot be read: No such file"):
        PromptSet.open(path)

    path.write_bytes(b"")
    with pytest.raises(DataError, match="no prompts in it"):
        PromptSet.open(path)

    write_prompts(path, [record("a", [1]), record("b", [2])])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="damaged after record 1"):
        PromptSet.open(path)


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 50))
def test_an_epoch_is_a_permutation_and_depends_on_nothing_else(
    num_prompts: int, seed: int, epoch: int
) -> None:
    order = epoch_order(num_prompts, seed, epoch)

    assert sorted(order.tolist()) == list(range(num_prompts))
    assert (order == epoch_order(num_prompts, seed, epoch)).all()


def test_the_order_is_the_same_on_every_machine() -> None:
    assert epoch_order(8, seed=7, epoch=3).tolist() == [7, 3, 0, 1, 2, 4, 5, 6]
    assert trajectory_seed(7, 0, 3, 1) == 1164434017698813820


def test_the_sequence_goes_through_epochs_without_gaps() -> None:
    order = PromptOrder(7, seed=1)

    places = [order.at(place) for place in range(21)]

    assert [epoch for epoch, _ in places] == [0] * 7 + [1] * 7 + [2] * 7
    assert Counter(idx for _, idx in places) == dict.fromkeys(range(7), 3)
    assert PromptOrder(7, seed=1).at(17) == places[17]
    unshuffled = PromptOrder(7, seed=1, shuffle=False)
    assert [unshuffled.at(place)[1] for place in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
