"""Rows that cannot be trained on: each is named with file, line and remedy."""

from __future__ import annotations

import datetime
import decimal
import importlib
import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_models import save_model

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.trainer_config import DataSection
from umbra.trainer.data.data_rows import read_rows
from umbra.trainer.data.prompt_preparation import PromptBudget, check_data, prepare_prompts

BUDGET = PromptBudget(max_context_len=1000, max_new_tokens=8)
GOOD: Final = b'{"prompt": "1", "id": 1}\n'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.open(save_model(tmp_path_factory.mktemp("model")))


def file_of(data: DataSection) -> Path:
    assert isinstance(data.train, Path)
    return data.train


def prepare(data: DataSection, tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
    """The rows as they are read from the prompt file; checked as before a start, too."""
    check_data(data)
    files = prepare_prompts(
        data, tokenizer, BUDGET, folder=file_of(data).parent, min_prompts=1, groups_per_step=1
    )
    prompts = PromptSet.open(files.train_path)
    rows = [prompts[idx].row for idx in range(len(prompts))]
    prompts.close()
    return rows


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "1\\ud800"}', r"column 'prompt' holds a lone surrogate \('\\ud800' at cha"),
        ('{"prompt": "1", "a": [{"b": "\\udfff"}]}', r"column 'a' holds a lone surrogate"),
        ('{"prompt": "1", "a": {"\\ud800": 1}}', r"column 'a' holds a lone surrogate"),
        ('{"prompt": "1", "a\\ud800": 1}', r"column 'a\\ud800' holds a lone surrogate"),
        ('{"prompt": "1", "id": "\\ud800"}', r"column 'id' holds a lone surrogate .*: remove it"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', r"column 'messages' holds"),
        ('{"prompt": "1", "a": 18446744073709551616}', r"column 'a' holds an integer beyond 64 b"),
        ('{"prompt": "1", "a": {"b": [-9223372036854775809]}}', r"'a' holds an integer"),
        ('{"prompt": "1", "id": 123456789012345678901}', r"'id' holds .*: write it as text"),
        ('{"prompt": "1", "a": ' + "9" * 5000 + "}", r"an integer has more than 4300 digits: wr"),
        ('{"prompt": "1", "a": ' + "[" * 9999 + "]" * 9999 + "}", r"nested deeper .*: flatten it"),
        ('{"prompt": "1", "a": ' + '{"a":' * 2000 + "1" + "}" * 2001, r"nested deeper .*: flatte"),
        ("[" * 200_000, "nested deeper than can be read"),
        ('{"prompt": "1", "prompt": "2"}', "2 values are named 'prompt': keep one of them"),
        ('{"prompt": "1", "a": {"b": 1, "c": 2, "b": 1}}', "2 values are named 'b': keep one"),
        ('{"prompt": "1", "id": [1]}', r"the id in column 'id' is a list; give text or a number"),
        ('{"prompt": "1", "id": null}', r"the id in column 'id' is a NoneType; give text or a"),
        ('{"prompt": "1\0"}', r"not JSON \(Invalid control character at character 14\); a file ha"),
        ("\0" * 100, r"not JSON \(Expecting value at character 1\); a file has one object"),
        (
            b'{"prompt": "\xe9"}',
            r"not UTF-8 text \(byte 0xe9 at byte 13\): convert the file to UTF",
        ),
        ('{"prompt": "1"}'.encode("utf-16"), r"not UTF-8 text \(byte 0xff at byte 1\): convert"),
    ],
)
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_row_that_cannot_be_written_is_named_with_its_line(
    tmp_path: Path, tokenizer: ModelTokenizer, line: str | bytes, said: str, comes_first: bool
) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes((b"" if comes_first else GOOD) + raw)
    data = DataSection(train=path, id_column="id" if '"id"' in str(line) else None)

    with pytest.raises(DataError, match=rf"rows.jsonl, line {1 if comes_first else 2}: .*{said}"):
        check_data(data) if comes_first else prepare(data, tokenizer)


def test_what_is_odd_but_can_be_written_is(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    depth = 400
    row = {
        "prompt": "1\0\u2028\U0001f600",
        "integers": [2**64 - 1, -(2**63)],
        "infinite": math.inf,
        "deep": json.loads("[" * depth + "]" * depth),
        "": None,
    }
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\n")  # with a byte order mark

    assert prepare(DataSection(train=path), tokenizer) == [row]


def test_two_rows_with_one_id_are_named(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + GOOD)

    with pytest.raises(DataError, match=r"rows.jsonl, line 2: prompt id '1' occurs twice"):
        prepare(DataSection(train=path, id_column="id"), tokenizer)


def write_parquet(path: Path, values: list[Any], type_name: str, *arguments: str) -> DataSection:
    """Rows with prompts, and a column `a` of a type that has no form in JSON."""
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    column = arrow.array(values, getattr(arrow, type_name)(*arguments))
    table = arrow.table({"prompt": ["1"] * len(values), "a": column})
    parquet.write_table(table, path, row_group_size=2)
    return DataSection(train=path)


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        (decimal.Decimal("1.50"), ("decimal128", 9, 2), "1.50"),
        (datetime.datetime(2026, 1, 2, 3, 4), ("timestamp", "us"), "2026-01-02T03:04:00"),
        (datetime.date(2026, 1, 2), ("date32",), "2026-01-02"),
        (datetime.time(3, 4), ("time64", "us"), "03:04:00"),
        (datetime.timedelta(minutes=1), ("duration", "s"), 60.0),
        # Beyond Python's: as Arrow writes it.
        (10**16, ("timestamp", "ms"), "<value out of range: 10000000000000000>"),
        (2**31 - 1, ("date32",), "<value out of range: 2147483647>"),
    ],
)
def test_a_value_of_a_parquet_file_that_json_does_not_have_is_text_or_a_number(
    tmp_path: Path, tokenizer: ModelTokenizer, value: Any, kind: tuple[Any, ...], plain: Any
) -> None:
    data = write_parquet(tmp_path / "rows.parquet", [None, None, value], *kind)

    assert [row["a"] for row in prepare(data, tokenizer)] == [None, None, plain]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    table = arrow.table([["1"], ["2"]], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "rows.parquet")

    with pytest.raises(DataError, match=r"rows.parquet: 2 values are named 'prompt': keep one"):
        check_data(DataSection(train=tmp_path / "rows.parquet"))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n \r\n"])
def test_a_file_may_be_one_list_of_objects(tmp_path: Path, indent: int | None, start: str) -> None:
    path = tmp_path / "rows.json"
    rows: list[Any] = [{"prompt": "1", "of": [{"a": 1}]}, {"prompt": "2"}]

    def read(items: list[Any], tail: str = "") -> list[tuple[str, dict[str, Any]]]:
        path.write_text(start + json.dumps(items, indent=indent) + tail, encoding="utf-8")
        return list(read_rows(path))

    assert read([]) == []
    assert read(rows, "\n") == [(f"{path}, row 1", rows[0]), (f"{path}, row 2", rows[1])]
    with pytest.raises(DataError, match=r"rows.json, row 3: a int, not an object of columns"):
        read([*rows, 3])
    with pytest.raises(DataError, match=r"rows.json: not JSON \(Extra data at (line \d+, )?cha"):
        read(rows, "]")


def test_json_of_a_parquet_file_is_what_it_stands_for(tmp_path: Path) -> None:
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))

    def schema(text: Any) -> Any:
        tool = arrow.struct({"name": arrow.string(), "parameters": text})
        by_name = arrow.map_(arrow.string(), text)
        columns = {"messages": arrow.list_(text), "tools": arrow.list_(tool), "by_name": by_name}
        return arrow.schema(columns)

    user, properties = {"role": "user", "content": "1"}, {"type": "object", "default": None}
    rows = [
        {"messages": ["null"], "tools": None, "by_name": None},
        {
            "messages": [json.dumps(user)],
            "tools": [{"name": "{}", "parameters": json.dumps(properties)}, {"name": None}],
            "by_name": [("a", "[1]")],
        },
    ]
    path = tmp_path / "rows.parquet"
    table = arrow.Table.from_pylist(rows, schema(arrow.string())).cast(schema(arrow.json_()))
    parquet.write_table(table, path)

    found = [row for _, row in read_rows(path)]

    tools = [{"name": "{}", "parameters": properties}, {}]
    assert found[0] == {"messages": [None], "tools": None, "by_name": None}
    assert found[1] == {"messages": [user], "tools": tools, "by_name": {"a": [1]}}


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "JSON in a column: Expecting property"), ('{"b":1,"b":2}', "2 values are named 'b'")],
)
def test_json_of_a_parquet_file_that_is_none_is_named_with_its_row(
    tmp_path: Path, text: str, words: str
) -> None:
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    table = arrow.table({"a": ["1", text]})
    as_json = arrow.schema([("a", arrow.json_())])
    parquet.write_table(table.cast(as_json), tmp_path / "rows.parquet")

    with pytest.raises(DataError, match=rf"rows.parquet, row 2: .*{words}"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_text_of_a_parquet_file_that_is_none_is_named_with_its_row(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    data = write_parquet(tmp_path / "rows.parquet", ["1", "22"], "string")
    content = file_of(data).read_bytes()
    assert content.count(b"22") >= 1
    file_of(data).write_bytes(content.replace(b"22", b"\xff\xff"))

    with pytest.raises(DataError, match=r"row 2: column 'a' cannot be read \('utf-8' codec"):
        prepare(data, tokenizer)


def test_numbers_and_bytes_of_a_parquet_file_are_written(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    data = write_parquet(tmp_path / "rows.parquet", [b"\xff", None], "binary")

    assert prepare(data, tokenizer) == [{"prompt": "1", "a": b"\xff"}, {"prompt": "1", "a": None}]


TEXTS = st.text(st.characters(codec=None), max_size=8)  # lone surrogates, too
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**400])
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": VALUES, "content": VALUES}), max_size=3)
ROWS = st.fixed_dictionaries(
    {},
    optional={"prompt": TEXTS | VALUES, "messages": MESSAGES | VALUES, "id": VALUES, "a": VALUES},
)


@settings(deadline=None)  # each example syncs files to the disk
@given(row=ROWS, has_ids=st.booleans())
def test_any_row_is_written_or_named(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: ModelTokenizer,
    row: dict[str, Any],
    has_ids: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    text = json.dumps(row)
    path.write_bytes(GOOD + text.encode() + b"\n")

    try:
        rows = prepare(DataSection(train=path, id_column="id" if has_ids else None), tokenizer)
    except DataError as error:
        assert str(error).startswith(f"{path}, line 2: ")  # noqa: PT017 - it need not be raised
    else:
        assert repr(rows[1]) == repr(json.loads(text))  # a NaN differs from itself


@settings(deadline=None)
@given(line=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_any_line_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: ModelTokenizer, line: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(GOOD + line)

    try:
        prepare(DataSection(train=path), tokenizer)
    except DataError as error:
        assert str(error).startswith(f"{path}, line ")  # noqa: PT017 - it need not be raised
