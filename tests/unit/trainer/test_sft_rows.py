"""Which tokens of a row supervised fine-tuning learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import END, byte_tokenizer

from umbra.runtime.errors import DataError
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.sft_config import SftSection
from umbra.trainer.config.trainer_config import DataSection
from umbra.trainer.data.sft_rows import SftRow, SftRows

_HEAD = "{% for message in messages %}[{{ message.role }}]"
_TAIL = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = f"{_HEAD}{{{{ message.content }}}}{END}\n{_TAIL}"
MARKED = (
    f"{_HEAD}{{% if message.role == 'assistant' %}}{{% generation %}}{{{{ message.content }}}}"
    f"{END}{{% endgeneration %}}{{% else %}}{{{{ message.content }}}}{END}{{% endif %}}\n{_TAIL}"
)
# As Qwen3's: reasoning stays only in the last answer.
FORGETS = (
    f"{_HEAD}{{{{ message.content if loop.last else message.content.split('|')[-1] }}}}"
    f"{END}\n{_TAIL}"
)
CHAT = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "hm|2"},
    {"role": "user", "content": "ö?"},
    {"role": "assistant", "content": "so|ö"},
]


def tokenizer_of(folder: Path, template: str = "") -> ModelTokenizer:
    state = byte_tokenizer(folder).state
    end = ModelTokenizer.of_state(state).encode(END)[0]
    state = replace(state, chat_template=template, eos_token_id=end, end_token_ids=[end])
    return ModelTokenizer.of_state(state)


def rows(max_len: int = 1000, **settings: Any) -> SftRows:
    names = ("loss_on", "completion_column")
    sft = {name: settings.pop(name) for name in names if name in settings}
    return SftRows(
        data=DataSection(train=Path("rows.jsonl"), **settings),
        sft=SftSection(**sft),
        max_len=max_len,
    )


def learned(tokenizer: ModelTokenizer, row: SftRow) -> list[str]:
    """The text of each run of learned tokens."""
    found: list[list[int]] = []
    before = 0
    for token, mask in zip(row.tokens.tolist(), row.mask.tolist(), strict=True):
        if mask and not before:
            found.append([])
        if mask:
            found[-1].append(token)
        before = mask
    return [tokenizer.decode_all(tokens) for tokens in found]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "marked"])
@pytest.mark.parametrize(
    ("loss_on", "texts"),
    [("all", [f"hm|2{END}", f"so|ö{END}"]), ("last", [f"so|ö{END}"])],
)
def test_the_assistants_messages_and_their_ends_are_learned(
    tmp_path: Path, template: str, loss_on: str, texts: list[str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, template)

    row = rows(loss_on=loss_on).tokenize("row", {"messages": CHAT}, tokenizer)

    assert learned(tokenizer, row) == texts
    whole = tokenizer.render_whole(CHAT, {}, asks_for_answer=False)
    assert row.tokens.tolist() == tokenizer.encode(whole)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "marked"])
@pytest.mark.parametrize(
    ("column", "completion"),
    [
        ("completion", "so|ö"),
        ("answer", [{"role": "assistant", "content": "so|ö"}]),
        ("answer", json.dumps(CHAT[3:])),
    ],
)
def test_of_a_chat_with_a_completion_only_the_completion_is_learned(
    tmp_path: Path, template: str, column: str, completion: object
) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    source = rows(completion_column=column)

    row = source.tokenize("row", {"prompt": CHAT[:3], column: completion}, tokenizer)

    assert learned(tokenizer, row) == [f"so|ö{END}"]
    prompt = tokenizer.encode_chat(CHAT[:3])  # as an engine gets it
    assert row.tokens[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("completion", ["4", f"4{END}"])
def test_a_plain_completion_ends_with_one_end_token(tmp_path: Path, completion: str) -> None:
    tokenizer = tokenizer_of(tmp_path)

    row = rows().tokenize("row", {"prompt": "2+2=", "completion": completion}, tokenizer)

    assert tokenizer.decode_all(row.tokens.tolist()) == f"2+2=4{END}"
    assert learned(tokenizer, row) == [f"4{END}"]


def test_a_template_that_changes_earlier_messages_gives_the_last_one_only(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, FORGETS)

    last = rows(loss_on="last").tokenize("row", {"messages": CHAT}, tokenizer)

    assert learned(tokenizer, last) == [f"so|ö{END}"]
    with pytest.raises(DataError, match=r"row 7: message 2 \(assistant\): .* sft.loss_on = 'last'"):
        rows().tokenize("row 7", {"messages": CHAT}, tokenizer)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "2+2="}, "row 7: no column 'completion'.*set sft.completion_column"),
        ({"prompt": "2+2=", "completion": None}, "row 7: column 'completion' .* is null: leave"),
        ({"prompt": "2+2=", "completion": 4}, "row 7: the prompt is text, .* holds a int"),
        ({"messages": CHAT[:1]}, "row 7: no message of the assistant, and so nothing to learn"),
        ({"messages": CHAT, "completion": "4"}, "row 7: the chat ends with the assistant's"),
        ({"messages": CHAT[:1], "completion": 4}, "row 7: .* neither text nor messages"),
        ({"prompt": "", "completion": ""}, "row 7: there is no token to learn"),
    ],
)
def test_a_row_without_an_answer_is_refused(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        rows().tokenize("row 7", row, tokenizer_of(tmp_path, PLAIN))


def test_a_template_whose_marks_do_not_fit_the_chat_is_refused(tmp_path: Path) -> None:
    template = MARKED.replace("message.role == 'assistant'", "loop.last")

    with pytest.raises(DataError, match="marks 1 parts as generated, and the chat has 2"):
        rows().tokenize("row 7", {"messages": CHAT}, tokenizer_of(tmp_path, template))


@pytest.mark.parametrize(
    ("overlong", "kept"), [("drop", [None, None]), ("truncate", ["2+2=45", None])]
)
def test_a_long_row_is_left_out_or_cut(
    tmp_path: Path, overlong: str, kept: list[str | None]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "2+2=", "completion": "456"}\n{"prompt": "2+2+2=", "completion": "6"}\n'
    )
    tokenizer = tokenizer_of(tmp_path)

    found = list(rows(6, overlong=overlong).read(path, tokenizer))

    shown = [row and tokenizer.decode_all(row.tokens.tolist()) for row in found]
    assert shown == kept
    with pytest.raises(DataError, match=r"line 1: the row has 8 tokens, more than sft.max_len = 6"):
        list(rows(6).read(path, tokenizer))
