"""What a row of data means, and how many bytes its prompt may have."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import CHATML, write_model_folder
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from umbra.runtime.errors import DataError, SettingError
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.trainer_config import DataSection
from umbra.trainer.data.data_rows import read_rows
from umbra.trainer.data.prompt_content import prompt_content
from umbra.trainer.data.prompt_preparation import PromptBudget, PromptFiles, prepare_prompts
from umbra.trainer.serving.served_pool import ModelText

ASK = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


def content_of(row: dict[str, Any], **settings: Any) -> Any:
    return prompt_content(DataSection(train=Path("x.jsonl"), **settings), "line 1", row)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("row", "settings", "content"),
    [
        ({"prompt": "2+2="}, {}, "2+2="),
        ({"prompt": "[1, 2] has a sum of"}, {}, "[1, 2] has a sum of"),
        ({"messages": [ASK]}, {}, [ASK]),
        ({"messages": [{**ASK, "name": None}]}, {}, [ASK]),
        ({"messages": [{"role": "user", "content": parts("2+", "2?")}]}, {}, [ASK]),
        ({"messages": json.dumps([ASK])}, {}, [ASK]),
        ({"prompt": json.dumps([ASK])}, {}, [ASK]),
        ({"messages": json.dumps([ASK])}, {"format": "chat"}, [ASK]),
        ({"prompt": json.dumps([ASK])}, {"format": "text"}, json.dumps([ASK])),
        ({"messages": "2+2?"}, {"format": "chat"}, [ASK]),
        ({"q": "2+2?"}, {"format": "chat", "messages_column": "q"}, [ASK]),
        ({"prompt": "2+2=", "messages": [ASK]}, {"format": "chat"}, [ASK]),
        ({"prompt": "2+2=", "messages": [ASK]}, {"format": "text"}, "2+2="),
        ({"prompt": "2+2=", "messages": None}, {}, "2+2="),
        ({"prompt": "1", "images": [], "image": None}, {}, "1"),
        ({"image": "a cat", "q": "2+2"}, {"template": "{q}="}, "2+2="),
        ({"image": "a cat", "images": [b"1"]}, {"template": "Draw {image}"}, "Draw a cat"),
        ({"image": "Draw a cat"}, {"prompt_column": "image"}, "Draw a cat"),
        ({"messages": [ASK, ANSWER]}, {"continue_final_message": True}, [ASK, ANSWER]),
        (
            {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call("add")]},
                          {"role": "tool", "content": "4"}]},
            {},
            [ASK, {"role": "assistant", "tool_calls": [call("add")]},
             {"role": "tool", "content": "4"}],
        ),
        ({"messages": [ASK]}, {"system_prompt": "Be brief."}, [SYSTEM, ASK]),
        ({"q": "2+2", "n": 7}, {"template": "{n}. {q}= {{}}"}, "7. 2+2= {}"),
        ({"q": "2+2"}, {"template": "{q}?", "format": "chat"}, [ASK]),
        (
            {"q": "2+2"},
            {"template": "{q}?", "format": "chat", "system_prompt": "Be brief."},
            [SYSTEM, ASK],
        ),
    ],
)  # fmt: skip
def test_a_row_has_one_meaning(row: dict[str, Any], settings: dict[str, Any], content: Any) -> None:
    assert content_of(row, **settings) == content


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"prompt": "a", "messages": [ASK]}, {}, r"both 'prompt' and 'messages'.*set data.format"),
        ({"prompt": [ASK]}, {"format": "text"}, r"holds a list, not text: set data.format = 'cha"),
        ({"prompt": None}, {}, r"column 'prompt' holds a NoneType, not text"),
        ({"messages": "2+2?"}, {}, r"must be a list of objects .*set data.format = 'chat'"),
        ({"messages": "[{"}, {}, r"must be a list of objects"),
        ({"messages": [ASK, ANSWER]}, {}, r"message 2 \(assistant\) is the last one.* set contin"),
        ({"messages": [{"role": "user", "content": None}]}, {}, r"message 1 \(user\) has no conte"),
        ({"messages": [{"role": "assistant"}, ASK]}, {}, r"message 1 \(assistant\) has no content"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            {},
            r"its content is a int, not text",
        ),
        (
            {"messages": [ASK, {"role": 1, "content": ""}]},
            {},
            r"message 2 has no role that is",
        ),
        (
            {"messages": [{"role": "user", "content": [*parts("a"), {"type": "image_url"}]}]},
            {},
            r"message 1 \(user\): its content has the part .*image_url.*text only, remove it",
        ),
        ({"prompt": "a", "images": [b"\xff"]}, {}, r"column 'images' is not empty.*text only"),
        (
            {"image": b"\xff"},
            {"template": "{image}"},
            r"column 'image' of data.template holds a by",
        ),
        ({"prompt": "a"}, {"system_prompt": "b"}, r"data.system_prompt needs a chat.*data.format"),
        (
            {"messages": [SYSTEM, ASK]},
            {"system_prompt": "b"},
            r"message 1 is a system message",
        ),
        ({"q": "a"}, {"template": "{q} {r}"}, r"no column 'r'; its columns are 'q': set data.temp"),
        ({"q": [1]}, {"template": "{q}"}, r"column 'q' of data.template holds a list, not text"),
        ({"q": "a"}, {"template": "{q:.2f}"}, r"cannot be filled \(Unknown format code 'f'"),
        ({"q": "a"}, {"template": "{q:{w}}"}, r"cannot be filled \('w'\): its formats do not fit"),
    ],
)
def test_a_row_without_a_clear_meaning_is_refused(
    row: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=rf"^line 1: .*{said}"):
        content_of(row, **settings)


@pytest.mark.parametrize("template", ["{", "{0}", "{}", "{a.b}", "{a[0]}", "no column"])
def test_a_template_that_names_no_columns_is_refused(template: str) -> None:
    with pytest.raises(SettingError, match="template"):
        DataSection(train=Path("x.jsonl"), template=template)


def test_a_prompt_has_the_tools_that_may_be_called(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", template="{{ tools or '' }}" + CHATML)
    data = tmp_path / "rows.jsonl"
    rows = [{"messages": [ASK], "tools": [{"name": "add"}]}, {"messages": [ASK], "tools": None}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    prompts = PromptSet.open(prepare(data, ModelTokenizer.open(folder)).train_path)

    asked = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert [prompts[idx].text for idx in range(2)] == ["[{'name': 'add'}]" + asked, asked]
    prompts.close()


def test_a_row_has_variables_of_the_template_of_its_own(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", template="{{ a }}{{ b }}" + CHATML)
    data = tmp_path / "rows.jsonl"
    given: list[object] = [{"b": 3}, '{"b": 4}', None]
    rows = [{"messages": [ASK], "chat_template_kwargs": variables} for variables in given]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, settings = ModelTokenizer.open(folder), {"chat_template_kwargs": {"a": 1, "b": 2}}

    prompts = PromptSet.open(prepare(data, tokenizer, **settings).train_path)

    assert [prompts[idx].text[:2] for idx in range(3)] == ["13", "14", "12"]
    prompts.close()
    for own, why in (
        ("short", "column 'chat_template_kwargs' holds 'short', no"),
        ({"add_generation_prompt": False}, "'add_generation_prompt' is no variable of a chat temp"),
    ):
        data.write_text(json.dumps({"messages": [ASK], "chat_template_kwargs": own}))
        with pytest.raises(DataError, match=f"line 1: {why}"):
            prepare(data, tokenizer, **settings)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK], "tools": [{"name": "add"}]},
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"name": "add"}]}, ASK]},
    ],
)
def test_a_prompt_whose_template_leaves_out_tools_is_refused(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    folder, data = write_model_folder(tmp_path / "model"), tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row))

    with pytest.raises(
        DataError, match=r"rows.jsonl, line 1: the row has tool\w+, and the chat tem"
    ):
        prepare(data, ModelTokenizer.open(folder))


def test_parquet_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")

    def asked(answer: str, *calls: dict[str, Any]) -> dict[str, Any]:
        messages = [ASK, {"role": "assistant", "content": "", "tool_calls": list(calls)}]
        tool = {"role": "tool", "content": answer}
        return {"messages": [*messages, tool], "checks": {"calls": list(calls)}, "answer": answer}

    rows: list[dict[str, Any]] = [
        asked("18", call("weather", city="Paris", at={"hour": 3})),
        asked("5", call("add", a=2, b=3), call("weather", at={"day": 1})),
        {"messages": [ASK], "checks": {}, "answer": None},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    found = [row for _, row in read_rows(tmp_path / "rows.parquet")]

    assert found == rows == [row for _, row in read_rows(tmp_path / "rows.jsonl")]


def test_all_ways_in_render_a_chat_alike(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    tokenizer = ModelTokenizer.open(folder)
    odd = [{"role": "user", "content": parts("2+", "2?"), "name": None}, ANSWER]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": odd}))

    files = prepare(path, tokenizer, continue_final_message=True)
    with_data = PromptSet.open(files.train_path)[0].tokens.tolist()
    text = ModelText(folder, trust_remote_code=False)
    served = asyncio.run(text.render_chat(odd, {}, continue_final_message=True))
    agents = tokenizer.encode_chat(odd, continue_final_message=True)

    assert served == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4"
    assert tokenizer.encode(served) == with_data == agents
    with pytest.raises(DataError, match="set continue_final_message"):
        asyncio.run(text.render_chat(odd, {}, continue_final_message=False))
    with pytest.raises(DataError, match="set continue_final_message"):
        tokenizer.encode_chat(odd)


def teacher_texts(
    folder: Path, rows: Sequence[dict[str, Any]], template: str, **settings: Any
) -> list[list[str]]:
    """The parts of the prompts of `data.teacher_template`."""
    tokenizer = ModelTokenizer.open(write_model_folder(folder / "model"))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = prepare(path, tokenizer, teacher_template=template, **settings)
    prompts = PromptSet.open(files.train_path)
    found = [prompts[idx].teacher for idx in range(len(prompts))]
    prompts.close()
    return [[tokenizer.decode_all(part.tolist()) for part in parts] for parts in found]


def test_a_teacher_s_prompt_has_the_row_s_columns_in_place_of_the_plain_prompt(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": "2+2=", "answer": 4}, {"prompt": "{1}", "answer": "{b}"}]

    found = teacher_texts(tmp_path, rows, "{answer}. {prompt}")

    assert found == [["4. 2+2="], ["{b}. {1}"]]


def test_a_teacher_s_chat_has_them_in_the_last_message_of_the_user(tmp_path: Path) -> None:
    rows = [{"messages": [SYSTEM, ASK, ANSWER, {"role": "user", "content": "3+3?"}], "hint": "6"}]

    (parts,) = teacher_texts(tmp_path, rows, "{prompt} {hint} {successful_completion}!")

    told = [SYSTEM, ASK, ANSWER, {"role": "user", "content": "3+3? 6 ~!"}]
    whole = ModelTokenizer.open(tmp_path / "model").render_chat(told, {})
    assert parts == whole.split("~")


@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        ({"prompt": "a"}, "{prompt} {hint}", "no column 'hint'; .* set data.teacher_template"),
        ({"prompt": "a", "hint": []}, "{hint}", "column 'hint' of data.teacher_template holds a l"),
        ({"messages": [SYSTEM]}, "{prompt}", "data.teacher_template needs a message of a user"),
        ({"prompt": "a" * 490}, "{prompt}{prompt}", "what follows it are 477 tokens longer than"),
        ({"prompt": "a" * 496}, "{prompt}{successful_completion}", "are 1 tokens longer than"),
    ],
)
def test_a_teacher_s_prompt_that_cannot_be_made_is_refused(
    tmp_path: Path, row: dict[str, Any], template: str, said: str
) -> None:
    with pytest.raises(DataError, match=rf"line 1: .*{said}"):
        teacher_texts(tmp_path, [row], template)


def prepare(path: Path, tokenizer: ModelTokenizer, **settings: Any) -> PromptFiles:
    return prepare_prompts(
        DataSection(train=path, **settings),
        tokenizer,
        PromptBudget(max_context_len=512, max_new_tokens=8),
        folder=path.parent,
        min_prompts=1,
        groups_per_step=1,
    )


def write_prompts(path: Path, prompts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_prompts_that_repeat_or_are_held_out_and_trained_on_are_warned_about(
    tmp_path: Path,
) -> None:
    tokenizer = ModelTokenizer.open(write_model_folder(tmp_path / "model"))
    held_out = write_prompts(tmp_path / "eval.jsonl", ["6", "5", "2", "3"])

    def warnings_with(*prompts: str) -> Sequence[str]:
        path = write_prompts(tmp_path / "train.jsonl", prompts)
        return prepare(path, tokenizer, eval=held_out, eval_limit=3).warnings

    assert warnings_with("1", "3") == []
    assert warnings_with("1", "2", "1", "1", "5") == [
        "data.train: 2 of 5 prompts repeat an earlier one, such as '1': they are trained on more "
        "often; remove them unless that is meant",
        "data.eval: 2 of 3 prompts are in data.train, too, such as '5': evaluations measure what "
        "was trained on; remove them from one of the two",
    ]


CORPUS = [
    "the thing that there is",
    "  " * 40,
    "é è ê " * 20,
    "日本語 テキスト " * 9,
    "-" * 90,
    "😀" * 30,
]


def byte_level() -> Any:
    """A tokenizer like that of Qwen and Llama 3."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_byte_fallback() -> Any:
    """A tokenizer like that of Llama 2, Mistral and Gemma: a space is three bytes long."""
    pieces = [
        "▁",
        "t",
        "h",
        "e",
        "th",
        "the",
        "▁the",
        "é",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocab = {piece: idx for idx, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer: Any = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def with_unknown_characters() -> Any:
    tokenizer: Any = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, with_byte_fallback, with_unknown_characters])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    request.param().save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    (folder / "config.json").write_text("{}")
    return ModelTokenizer.open(folder)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=40)
    | st.lists(st.sampled_from([*CORPUS, " ", "-", "e\u0301", "각"]), max_size=6).map("".join)
)
def test_no_prompt_has_more_bytes_than_its_tokens_may_stand_for(
    tokenizer: ModelTokenizer, text: str
) -> None:
    num_tokens = len(tokenizer.encode(text))

    assert len(text.encode()) <= num_tokens * tokenizer.max_token_nbytes
