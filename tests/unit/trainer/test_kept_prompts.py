"""The data of a resumed run is compared with the data that it began with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from training_models import save_model

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.trainer_config import DataSection
from umbra.trainer.data.kept_prompts import KeptPrompts
from umbra.trainer.data.prompt_preparation import PromptBudget, prepare_prompts

ROWS = [{"prompt": f"{idx}+{idx}=", "answer": str(2 * idx)} for idx in range(5)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.open(save_model(tmp_path_factory.mktemp("model")))


def start(
    folder: Path,
    tokenizer: ModelTokenizer,
    rows: Sequence[dict[str, Any]],
    eval_rows: Sequence[dict[str, Any]] = ROWS[:2],
    *,
    max_new_tokens: int = 8,
    **settings: Any,
) -> list[str]:
    """Prepares the prompts of a resumed start; returns what it notes."""
    for name, some in (("train", rows), ("eval", eval_rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    notes: list[str] = []
    prepare_prompts(
        DataSection(train=folder / "train.jsonl", eval=folder / "eval.jsonl", **settings),
        tokenizer,
        PromptBudget(max_context_len=32, max_new_tokens=max_new_tokens),
        folder=folder,
        min_prompts=1,
        groups_per_step=1,
        kept=KeptPrompts(folder, "do something else", notes.append),
    )
    return notes


def refusal(folder: Path, tokenizer: ModelTokenizer, *args: Any, **settings: Any) -> str:
    before = (folder / "prompts.msgpack").read_bytes()
    with pytest.raises(DataError) as raised:
        start(folder, tokenizer, *args, **settings)
    assert (folder / "prompts.msgpack").read_bytes() == before  # `umbra samples` reads it
    text = str(raised.value)
    assert f"data.train: {folder}/train.jsonl, prompt " in text
    assert text.endswith("or do something else")
    return text


def test_the_same_data_in_another_file_is_accepted(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    rows = [{"prompt": "a", "score": float("nan"), "tags": ["b", {"c": None}]}]
    start(tmp_path, tokenizer, rows)

    assert start(tmp_path, tokenizer, [dict(reversed(rows[0].items()))]) == []


def test_rows_in_another_order_are_refused_by_the_first_that_differs(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    start(tmp_path, tokenizer, ROWS)

    text = refusal(tmp_path, tokenizer, [ROWS[0], ROWS[2], ROWS[1], *ROWS[3:]])

    assert "prompt 2: it is '2+2=' and was '1+1='" in text


def test_a_row_that_is_inserted_appended_or_removed_is_refused(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    start(tmp_path, tokenizer, ROWS)

    inserted = refusal(tmp_path, tokenizer, [{"prompt": "new"}, *ROWS])
    appended = refusal(tmp_path, tokenizer, [*ROWS, {"prompt": "new"}])
    removed = refusal(tmp_path, tokenizer, ROWS[:4])

    assert "prompt 1: it is 'new' and was '0+0='" in inserted
    assert "prompt 6: it is new (id '5'): 'new'" in appended
    assert "prompt 5: it is missing: '4+4=' (id '4')" in removed


def test_prompts_that_are_dropped_for_another_length_are_refused(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    rows = [{"prompt": "1" * 10}, *ROWS]
    start(tmp_path, tokenizer, rows, overlong="drop")

    text = refusal(tmp_path, tokenizer, rows, overlong="drop", max_new_tokens=24)

    assert "prompt 1: it is '0+0=' and was '1111111111'" in text
    assert "rollout.max_new_tokens" in text


def test_other_ids_and_another_tokenizer_are_refused(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    rows = [{"prompt": "a", "one": "x", "two": "y"}]
    start(tmp_path, tokenizer, rows, rows, id_column="one")
    save_model(tmp_path / "other", vocab_size=128)
    content = json.loads((tmp_path / "other/tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(content))

    ids = refusal(tmp_path, tokenizer, rows, rows, id_column="two")
    tokens = refusal(tmp_path, ModelTokenizer.open(tmp_path / "other"), rows, rows, id_column="one")

    assert "prompt 1: its id is 'y' and was 'x'" in ids
    assert "prompt 1: 'a' has 1 tokens and had 1 others: the tokenizer changed" in tokens


def test_long_prompts_are_shown_where_they_differ(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    same = "the same words before it "
    start(tmp_path, tokenizer, [{"prompt": same[:20] + "1"}], max_new_tokens=2)

    text = refusal(tmp_path, tokenizer, [{"prompt": same[:22] + "2"}], max_new_tokens=2)

    assert "it is " in text
    assert "the same words befor1" in text


def test_another_answer_of_a_row_is_noted_once(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    start(tmp_path, tokenizer, ROWS)

    (note,) = start(tmp_path, tokenizer, [row | {"answer": "7"} for row in ROWS])

    assert "prompt 1 (id '0'): column 'answer' changed" in note
    assert "rewards that groups already have stay as they are" in note


def test_other_held_out_prompts_are_noted(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    start(tmp_path, tokenizer, ROWS)

    (note,) = start(tmp_path, tokenizer, ROWS, ROWS[2:4])

    assert "eval.jsonl, prompt 1: it is '2+2=' and was '0+0='" in note
    prompts = PromptSet.open(tmp_path / "eval_prompts.msgpack")
    assert [prompts[idx].text for idx in range(len(prompts))] == ["2+2=", "3+3="]
    prompts.close()
