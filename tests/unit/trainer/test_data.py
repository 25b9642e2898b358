"""Reading data sets, and the errors about bad ones."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from training_models import CHARS, save_model, save_tokenizer

from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.text.model_files import read_model_config
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.trainer_config import DataSection
from umbra.trainer.data.prompt_preparation import (
    PromptBudget,
    PromptFiles,
    check_data,
    prepare_held_out,
    prepare_prompts,
)

Rows = Sequence[Mapping[str, Any]]
BUDGET = PromptBudget(max_context_len=32, max_new_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer.open(model_dir)


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(
    folder: Path,
    tokenizer: ModelTokenizer,
    rows: Rows,
    ranks: int = 1,
    groups: int = 1,
    **settings: Any,
) -> PromptFiles:
    data = DataSection(train=write_jsonl(folder / "train.jsonl", rows), **settings)
    return prepare_prompts(
        data, tokenizer, BUDGET, folder=folder, min_prompts=ranks, groups_per_step=groups
    )


def num_prompts(path: Path) -> int:
    prompts = PromptSet.open(path)
    prompts.close()
    return len(prompts)


def ids(text: str) -> list[int]:
    return [2 + CHARS.index(char) for char in text]


def test_plain_prompts_keep_their_columns(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+2=", "answer": "4"}]

    files = prepare(tmp_path, tokenizer, rows)

    prompts = PromptSet.open(files.train_path)
    assert files.eval_path is None
    assert len(prompts) == 2
    assert prompts[1].prompt_id == "1"
    assert prompts[1].text == "2+2="
    assert prompts[1].tokens.tolist() == ids("2+2=")
    assert prompts[1].row == rows[1]
    prompts.close()


def test_further_sets_of_held_out_prompts_come_behind_the_first(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    first, hard = ([{"prompt": f"{a}+{b}="} for a in range(2)] for b in range(2))
    data = DataSection(
        train=write_jsonl(tmp_path / "train.jsonl", [{"prompt": "1"}]),
        eval=write_jsonl(tmp_path / "eval.jsonl", first),
        eval_limit=1,
    )
    sets = {"hard": write_jsonl(tmp_path / "hard.jsonl", hard)}

    check_data(data, sets)
    files = prepare_prompts(
        data, tokenizer, BUDGET, folder=tmp_path, min_prompts=1, groups_per_step=1, sets=sets
    )

    assert files.eval_path is not None
    prompts = PromptSet.open(files.eval_path)
    assert [(each.prompt_id, each.text) for each in (prompts[0], prompts[1])] == [
        ("eval/0", "0+0="),
        ("hard/0", "0+1="),
    ]
    assert files.eval_sets == {"eval": 1, "hard": 1}
    prompts.close()
    with pytest.raises(DataError, match=r"^eval\.sets\.hard: "):
        check_data(data, {"hard": tmp_path / "missing.jsonl"})


def test_messages_go_through_the_chat_template(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]

    files = prepare(tmp_path, tokenizer, rows)

    prompts = PromptSet.open(files.train_path)
    assert prompts[0].text == "u=hi a="
    assert prompts[0].tokens.tolist() == ids("u=hi a=")
    prompts.close()


def test_a_list_of_files_is_one_data_set(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    table, bad = tmp_path / "more.parquet", write_jsonl(tmp_path / "bad.jsonl", [{"q": "1"}])
    parquet.write_table(arrow.table({"prompt": ["3", "4"]}), table)
    lines = write_jsonl(tmp_path / "lines.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    data = DataSection(train=(lines, table), eval=(table, lines), eval_limit=3)

    check_data(data)
    files = prepare_prompts(
        data, tokenizer, BUDGET, folder=tmp_path, min_prompts=1, groups_per_step=1
    )

    assert files.eval_path is not None
    for path, texts in ((files.train_path, "1234"), (files.eval_path, "341")):
        prompts = PromptSet.open(path)
        found = [(prompts[idx].prompt_id, prompts[idx].text) for idx in range(len(prompts))]
        prompts.close()
        assert found == [(str(idx), text) for idx, text in enumerate(texts)]
    with pytest.raises(DataError, match=r"bad.jsonl, line 1: no column 'prompt'"):
        check_data(DataSection(train=(lines, bad)))


def test_each_set_of_held_out_prompts_is_limited(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    rows = [{"prompt": "1"}, {"prompt": "2"}]
    sets = {name: [write_jsonl(tmp_path / f"{name}.jsonl", rows)] for name in ("easy", "hard")}
    data = DataSection(train=tmp_path / "unread.jsonl", eval_limit=1)

    files = prepare_held_out(data, sets, tokenizer, BUDGET, folder=tmp_path)

    assert files.eval_path is not None
    assert num_prompts(files.eval_path) == 2


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([{"prompt": "1"}, {"prompt": 7}], {}, r"line 2.*int, not text"),
        ([{"prompt": ""}], {}, r"line 1.*prompt is empty"),
        ([{"prompt": "1" * 25}], {}, r"25 tokens.*only 24 fit a context of 32.*'drop'"),
        ([{"prompt": "1" * 25}], {"overlong": "drop"}, r"empty.*too long"),
    ],
)
def test_a_bad_row_is_named_with_its_line(
    tmp_path: Path, tokenizer: ModelTokenizer, rows: Rows, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        prepare(tmp_path, tokenizer, rows, **settings)


def test_overlong_prompts_can_be_dropped(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    rows = [{"prompt": "1" * 25}, {"prompt": "1" * 24}]

    files = prepare(tmp_path, tokenizer, rows, overlong="drop")

    assert num_prompts(files.train_path) == 1


def test_more_ranks_than_prompts_is_an_error(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    with pytest.raises(DataError, match=r"1 prompts for 4 ranks.*use 1 ranks or fewer"):
        prepare(tmp_path, tokenizer, [{"prompt": "1"}], ranks=4)


def test_fewer_prompts_than_a_step_takes_are_reported_once(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    rows = [{"prompt": "1"}, {"prompt": "2"}]

    assert not prepare(tmp_path, tokenizer, rows, groups=2).warnings
    (said,) = prepare(tmp_path, tokenizer, rows, groups=3).warnings

    assert "has 2 prompts, fewer than rollout.groups_per_step = 3" in said
    assert "lower rollout.groups_per_step, or give more prompts" in said


def test_a_budget_without_room_for_a_prompt_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens = 8 leaves no room.*lower rollout.max"):
        PromptBudget(max_context_len=8, max_new_tokens=8).check()
    PromptBudget(max_context_len=9, max_new_tokens=8).check()


def test_lines_that_are_not_objects_are_named(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1"}\n\n{"prompt": \n')
    data = DataSection(train=path)

    with pytest.raises(DataError, match="line 3: not JSON"):
        prepare_prompts(data, tokenizer, BUDGET, folder=tmp_path, min_prompts=1, groups_per_step=1)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, r"data.train: no file .*none.jsonl; paths are"),
        ("similar.jsonl", None, r"no file .*similar.jsonl, did you mean .*/similar.json\?; paths"),
        ("x" * 300, None, r"data.train: .*xxx cannot be read: File name too long"),
        ("empty.jsonl", "", r"empty.jsonl is empty"),
        ("table.csv", "a,b", r"'.csv'.*\.jsonl.*\.parquet"),
        ("blank.jsonl", "\n\n", r"data set .*blank.jsonl is empty: it has no rows"),
        ("torn.jsonl", '{"prompt"', r"torn.jsonl, line 1: not JSON"),
    ],
)
def test_unusable_files_are_named_before_anything_starts(
    tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    path = tmp_path / name
    (tmp_path / "similar.json").touch()
    if content is not None:
        path.write_text(content)

    with pytest.raises(DataError, match=said):
        check_data(DataSection(train=path))


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        (
            {"question": "1"},
            {},
            r"'prompt' nor 'messages'; its columns are 'question': set data.prompt_column$",
        ),
        ({"prompt": 7}, {}, r"int, not text"),
        ({"messages": "hello"}, {}, r"list of objects with 'role'"),
        ({"prompt": "1"}, {"format": "chat"}, r"'messages'; .*: set data.messages_column"),
        ({"prompt": "1"}, {"id_column": "key"}, r"'key'; .* 'prompt': set data.id_column"),
    ],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_a_wrong_column_is_named_before_anything_starts(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], said: str, held_out: bool
) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [row])
    chat = {"messages": [{"role": "user", "content": "1"}]}
    good_row = {"key": "a", **(chat if "format" in settings else {"prompt": "1"})}
    good = write_jsonl(tmp_path / "good.jsonl", [good_row])
    train, held_out_path = (good, bad) if held_out else (bad, good)

    check_data(DataSection(train=good, eval=good, **settings))
    with pytest.raises(DataError, match=rf"bad.jsonl, line 1: .*{said}"):
        check_data(DataSection(train=train, eval=held_out_path, **settings))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    save_tokenizer(tmp_path, first_id=60)

    with pytest.raises(DataError, match=r"token id 100.*vocab_size 64"):
        ModelTokenizer.open(tmp_path)


def test_a_directory_without_tokenizer_is_named(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())

    with pytest.raises(DataError, match="no usable tokenizer"):
        ModelTokenizer.open(tmp_path)


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"model.path: no directory {tmp_path / 'none'}"):
        read_model_config(tmp_path / "none")
    with pytest.raises(DataError, match=r"config.json cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"it has a LoRA adapter and no model"):
        read_model_config(tmp_path)
    with pytest.raises(DataError, match=r"model.path: .*xxx cannot be read: File name too long"):
        read_model_config(tmp_path / ("x" * 300))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"config.json is not valid JSON: maximum recursion depth"):
        read_model_config(tmp_path)
