"""Rows of supervised fine-tuning, and its settings."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from byte_tokenizer import END, byte_tokenizer
from minimal_config import MINIMAL
from training_models import save_model

from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.settings import annotations_of
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.sft_config import RL_ONLY, SftConfig, SftSection
from umbra.trainer.config.trainer_config import DataSection, TrainerConfig
from umbra.trainer.data.sft_rows import SftRow, SftRows
from umbra.trainer.sft.row_preparation import read_rows

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
# As Qwen's: tools in front, calls as JSON in the assistant's message, results by the user.
TOOLS = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    f"{END}{{% endif %}}{{% for message in messages %}}"
    "{% if message.role == 'tool' %}[user]<result>{{ message.content }}</result>"
    "{% else %}[{{ message.role }}]{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<call>"
    "{{ (call.function or call) | tojson }}</call>{% endfor %}"
    f"{END}{{% endgeneration %}}{{% else %}}{{{{ message.content }}}}{{% endif %}}{{% endif %}}"
    f"{{% if message.role != 'assistant' %}}{END}{{% endif %}}{_TAIL}"
)
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
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


def calling(arguments: object, **fields: Any) -> list[dict[str, Any]]:
    call = {"name": "add", "arguments": arguments}
    return [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", **fields, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "prefixes"])
@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])], ids=["list", "text"])
@pytest.mark.parametrize(
    "messages",
    [
        calling({"a": 1, "b": 1}),
        calling('{"a": 1, "b": 1}', content=None),
        json.dumps(calling('{"a": 1, "b": 1}')),
    ],
    ids=["object", "text", "chat as text"],
)
def test_calls_of_tools_are_learned_and_their_results_are_not(
    tmp_path: Path, marks: bool, tools: object, messages: object
) -> None:
    template = TOOLS if marks else re.sub(r"{% (end)?generation %}", "", TOOLS)
    tokenizer = tokenizer_of(tmp_path, template)

    row = rows().tokenize("row", {"messages": messages, "tools": tools}, tokenizer)

    call = '<call>{"name": "add", "arguments": {"a": 1, "b": 1}}</call>'
    assert learned(tokenizer, row) == [f"{call}{END}", f"It is 2.{END}"]
    head = f"[tools]{json.dumps(ADD)}{END}[user]1+1?{END}[assistant]"
    result = f"[user]<result>2</result>{END}[assistant]"
    whole = tokenizer.decode_all(row.tokens.tolist())
    assert whole == f"{head}{call}{END}{result}It is 2.{END}"


@pytest.mark.parametrize("arguments", [{}, None, "", "null"])
def test_a_call_may_have_no_arguments_and_a_message_no_calls(
    tmp_path: Path, arguments: object
) -> None:
    asks = "{% if message.tool_calls is defined and not message.tool_calls %}-{% endif %}"
    tokenizer = tokenizer_of(tmp_path, TOOLS.replace("[{{ message.role }}]", asks))
    messages: list[dict[str, Any]] = [{"tool_calls": [], **each} for each in calling(arguments)]

    row = rows().tokenize("row", {"messages": messages, "tools": [ADD]}, tokenizer)

    assert learned(tokenizer, row)[0] == f'<call>{{"name": "add", "arguments": {{}}}}</call>{END}'
    assert "-" not in tokenizer.decode_all(row.tokens.tolist())


def test_tools_have_a_column_of_any_name(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, TOOLS)
    row = {"messages": CHAT, "functions": [ADD["function"]], "tools": "hammer"}

    found = rows(tools_column="functions").tokenize("row", row, tokenizer)
    without = rows(tools_column="").tokenize("row", row, tokenizer)

    assert tokenizer.decode_all(found.tokens.tolist()).startswith('[tools]{"name": "add"')
    assert tokenizer.decode_all(without.tokens.tolist()).startswith("[user]")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"tools": "hammer"},
            r"column 'tools' \(data.tools_column\) holds 'hammer', which is no sc",
        ),
        (
            {"tools": 3},
            r"column 'tools' \(data.tools_column\) holds 3, which is no schema of a fun",
        ),
        (
            {"tools": [ADD, {}]},
            r"column 'tools' \(data.tools_column\) holds {}, .*data.tools_column = ''",
        ),
        (
            {"tools": '["add"]'},
            r"column 'tools' \(data.tools_column\) holds 'add', which is no sche",
        ),
        (
            {"messages": calling("{")},
            r"message 2 \(assistant\): call 1 of its tool_calls has",
        ),
        (
            {"messages": calling("[1]")},
            r"message 2 .*: call 1 .* that are no object: \[1",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{"id": "c1"}]}]},
            r"message 2 \(assistant\): call 1 of its tool_calls names no function",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "tool_calls": "add"}]},
            r"message 2 \(assistant\): its tool_calls are a str, not a list",
        ),
    ],
)
def test_tools_that_a_template_could_not_render_are_refused(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=f"^row 7: {words}"):
        rows().tokenize("row 7", {"messages": CHAT, **row}, tokenizer_of(tmp_path, TOOLS))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": CHAT, "tools": [ADD]}, "tools, and .* or set data.tools_column = ''$"),
        (
            {"messages": calling({})},
            "tool_calls, and the chat template of .* or leave the row out$",
        ),
    ],
)
def test_a_template_that_leaves_out_tools_is_refused(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=f"^row 7: the row has {words}"):
        rows().tokenize("row 7", row, tokenizer_of(tmp_path, PLAIN))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_row_does_not_say_how_its_chat_is_rendered(tmp_path: Path, template: str) -> None:
    row = {"messages": CHAT, "chat_template_kwargs": {"continue_final_message": True}}

    with pytest.raises(DataError, match="row 1: 'continue_final_message' is no variable of a chat"):
        rows().tokenize("row 1", row, tokenizer_of(tmp_path, template))


def test_a_chat_that_the_assistant_begins_is_learned_but_for_its_beginning(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{{ messages[0].role[:0] }}" + PLAIN)
    begun = {"role": "assistant", "content": "Hi"}

    row = rows().tokenize("row", {"messages": [{**begun, "weight": 0}, *CHAT[:2]]}, tokenizer)

    assert learned(tokenizer, row) == [f"hm|2{END}"]
    with pytest.raises(
        DataError, match=r"row 7: message 1 \(assistant\) has nothing before it, .*: gi"
    ):
        rows().tokenize("row 7", {"messages": [begun, *CHAT[:2]]}, tokenizer)


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"loss": 0}, {"train": False}, {"trainable": False}]
)
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_message_that_is_marked_as_not_to_learn_is_not(
    tmp_path: Path, template: str, mark: dict[str, Any]
) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    chat = [CHAT[0], {**CHAT[1], **mark}, CHAT[2], {**CHAT[3], "weight": 1}]

    row = rows().tokenize("row", {"messages": chat}, tokenizer)

    assert learned(tokenizer, row) == [f"so|ö{END}"]
    with pytest.raises(DataError, match="no message of the assistant, or each has a weight of 0"):
        rows().tokenize("row", {"messages": chat[:2]}, tokenizer)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_that_leaves_out_what_is_to_be_learned_is_refused(
    tmp_path: Path, template: str, key: str
) -> None:
    chat = [*CHAT[:3], {**CHAT[3], key: "Is it an o?"}]

    with pytest.raises(
        DataError, match=r"^row 7: message 4 .* leaves out its \w+, so that it would"
    ):
        rows().tokenize("row 7", {"messages": chat}, tokenizer_of(tmp_path, template))


@pytest.mark.parametrize("text", ["Hm.", "1+1"], ids=["new", "in the question"])
def test_a_template_that_leaves_out_the_text_beside_a_call_is_refused(
    tmp_path: Path, text: str
) -> None:
    template = TOOLS.replace("{{ message.content }}{% for", "{% for")

    with pytest.raises(DataError, match=r"^row 7: message 2 .* leaves out its content, so that it"):
        rows().tokenize(
            "row 7", {"messages": calling({}, content=text)}, tokenizer_of(tmp_path, template)
        )


def test_an_answer_that_begins_otherwise_than_the_template_asks_for_it_is_refused(
    tmp_path: Path,
) -> None:
    asks = "[assistant]{% if enable_thinking is not defined %}<think>{% endif %}{% endif"
    tokenizer = tokenizer_of(tmp_path, PLAIN.replace("[assistant]{% endif", asks))

    with pytest.raises(DataError, match=r"by '\[assistant\]<think>', .* as '\[assistant\]hm\|2<eo"):
        rows().tokenize("row 7", {"messages": CHAT[:2]}, tokenizer)
    variables: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    by_setting = rows(**variables).tokenize("row", {"messages": CHAT[:2]}, tokenizer)
    by_column = rows().tokenize("row", {"messages": CHAT[:2], **variables}, tokenizer)

    assert learned(tokenizer, by_setting) == learned(tokenizer, by_column) == [f"hm|2{END}"]


def test_a_chat_whose_last_answer_changes_the_others_has_no_remedy_that_is_set(
    tmp_path: Path,
) -> None:
    seen = "{% if messages[-1].content == 'so|ö' %}!{% endif %}"
    tokenizer = tokenizer_of(tmp_path, seen + PLAIN)

    with pytest.raises(DataError, match=r"message 4 .* are not known: mark the assistant's"):
        rows(loss_on="last").tokenize("row 7", {"messages": CHAT}, tokenizer)


def test_reasoning_that_the_template_begins_is_not_left_out(tmp_path: Path) -> None:
    thinks = PLAIN.replace("[assistant]{% endif", "[assistant]<think>\n{% endif")
    tokenizer = tokenizer_of(tmp_path, thinks)
    answer = {"role": "assistant", "content": "<think>\nHm.</think>2"}

    row = rows().tokenize("row", {"messages": [CHAT[0], answer]}, tokenizer)

    assert learned(tokenizer, row) == [f"Hm.</think>2{END}"]


def test_spaces_that_a_template_changes_are_not_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, PLAIN.replace("content }}", "content | trim }}"))
    chat = [CHAT[0], {"role": "assistant", "content": " 2\n"}]

    row = rows().tokenize("row", {"messages": chat}, tokenizer)

    assert learned(tokenizer, row) == [f"2{END}"]


def adding_spaces(tokenizer: ModelTokenizer) -> ModelTokenizer:
    """Puts a space in front of each text, and of what follows a special token, as those of Llama 2,
    Mistral and Phi-3 do."""
    state = tokenizer.state
    added = '"add_prefix_space":false', '"add_prefix_space":true'
    assert added[0] in state.tokenizer
    return ModelTokenizer.of_state(replace(state, tokenizer=state.tokenizer.replace(*added)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "completion": "4"},
        {"messages": [CHAT[0], {"role": "assistant", "content": "4"}]},
    ],
)
def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_before_an_answer(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    tokenizer = adding_spaces(tokenizer_of(tmp_path, PLAIN))

    found = rows().tokenize("row", row, tokenizer)

    assert learned(tokenizer, found) == [f"4{END}"]
    assert tokenizer.decode_all(found.tokens.tolist()).startswith(" ")
    assert tokenizer.encode_more("1\n") == tokenizer.encode("1\n")[1:]


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": END, "completion": "4"}])
def test_a_tokenizer_that_puts_a_space_behind_a_special_token_puts_it_before_an_answer_there(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    template = f"{{% for message in messages %}}{{{{ message.content }}}}{END}{{% endfor %}}"
    tokenizer = adding_spaces(tokenizer_of(tmp_path, template))

    found = rows().tokenize("row", row, tokenizer)

    text = f"1+1{END}hm|2{END}ö?{END}so|ö{END}" if "messages" in row else f"{END}4{END}"
    assert found.tokens.tolist() == tokenizer.encode(text)
    assert learned(tokenizer, found)[0] in (f" hm|2{END}", f" 4{END}")


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
        ({"messages": CHAT[:1]}, "row 7: no message of the assistant, or each has a weight of 0"),
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


# As TRL's for Phi-3 and Gemma 4: the end of the last message, and a call, have marks of their own.
SEVERAL: Final = (
    f"{_HEAD}{{% if message.role == 'assistant' %}}"
    "{% for call in message.tool_calls or [] %}{% generation %}{{ call.function.name }}!"
    "{% endgeneration %}ok,{% endfor %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}"
    "{% endif %};{% endfor %}{% if messages[-1].role == 'assistant' %}{% generation %}"
    f"{END}{{% endgeneration %}}{{% else %}}{END}{{% endif %}}"
)


@pytest.mark.parametrize(
    ("chat", "texts"),
    [
        (CHAT, ["hm|2", "so|ö", END]),
        ([CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]], ["so|ö", END]),
        ([*CHAT[:3], {**CHAT[3], "weight": 0}], ["hm|2"]),
        (calling({}, content="Hm."), ["add!", "Hm.", "It is 2.", END]),
        (calling({}, content="Hm.", weight=0), ["It is 2.", END]),
    ],
)
def test_a_template_may_mark_several_parts_of_a_message(
    tmp_path: Path, chat: list[dict[str, Any]], texts: list[str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, SEVERAL)

    row = rows().tokenize("row", {"messages": chat}, tokenizer)

    assert learned(tokenizer, row) == texts
    whole = tokenizer.render_whole(chat, {}, asks_for_answer=False)
    assert row.tokens.tolist() == tokenizer.encode(whole)


def test_a_template_may_put_a_token_behind_the_whole_chat(tmp_path: Path) -> None:
    state = tokenizer_of(tmp_path, PLAIN + "{% if not add_generation_prompt %}!!{% endif %}").state
    tokenizer = ModelTokenizer.of_state(replace(state, special_tokens={"eos_token": "!!"}))

    row = rows().tokenize("row", {"messages": CHAT}, tokenizer)

    assert learned(tokenizer, row) == [f"hm|2{END}", f"so|ö{END}"]
    assert tokenizer.decode_all(row.tokens.tolist()).endswith(f"so|ö{END}\n!!")


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


DOCUMENT: Final = Path(__file__).resolve().parents[3] / "docs" / "sft.md"
VALUES: dict[str, Any] = {name: MINIMAL[name] for name in ("model", "data", "train")}


def config(*overrides: str, **sections: Any) -> SftConfig:
    return check_config(SftConfig, VALUES | sections, "config", overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.loss=gspo", "only RL training has a use for train.loss: leave it out"),
        ("train.kl_coef=0.1", "only RL training has a use for train.kl_coef"),
        ("train.loss_args.tau=1", "only RL training has a use for train.loss_args"),
        ("data.id_column=name", "only RL training has a use for data.id_column"),
        ("rollout.group_size=4", "only `python -m umbra.trainer` uses it, leave it out"),
        ("sft.batch_sise=4", "sft.batch_sise is unknown; did you mean 'batch_size'?"),
        ("sft.batch_size=0", "(command line): input should be greater than or equal to 1"),
        ("sft.loss_on=first", "(command line): input should be 'all' or 'last', got 'first'"),
        ("train.epochs=2", "train.steps = 10 and train.epochs = 2.0: "),
        ("train.max_length=9", "'max_length' of TRL: use 'sft.max_len'"),
        ("train.beta=0.1", "'beta' of TRL: only RL training has a use for 'train.kl_coef': leave"),
        ("train.num_generations=4", "only RL training has a use for 'rollout.group_size'"),
        ("train.kl_coeff=1", "train.kl_coeff is unknown (docs/configuration.md"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(override)

    assert words in str(raised.value)
    assert override in str(raised.value)


def test_sections_of_the_other_training_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"reward is unknown here: only `python -m umbra.trainer`"
    ):
        config(reward={"function": "rewards:score"})
    with pytest.raises(ConfigError, match=r"only `python -m umbra.trainer.sft` uses it"):
        check_config(TrainerConfig, MINIMAL | {"sft": {}}, "config")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trian.steps=3", r"trian is unknown; did you mean 'train'\?"),
        ("val.data=rows.jsonl", r"val is unknown; 'val\.data' of prime-rl: use 'data\.eval' "),
        ("train.batch_size=8", r"train\.batch_size is unknown; did you mean 'sft\.batch_size'\?"),
    ],
)
def test_unknown_settings_are_answered_by_those_of_fine_tuning(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(override)


SHARED = {
    "run": "dir loggers name overwrite profile_steps resume",
    "data": "chat_template_kwargs eval eval_limit format messages_column overlong prompt_column "
    "shuffle system_prompt template tools_column train",
    "train": "activation_checkpointing betas checkpoint_every compile device ema "
    "embedding_lr_ratio embedding_weight_decay epochs eps eval_at_start eval_every "
    "export keep_checkpoints learning_rate max_grad_norm max_tokens_per_micro_batch micro_batches "
    "min_lr_ratio optimizer schedule seed shutdown_grace_s skip_nonfinite steps vector_lr_ratio "
    "vector_weight_decay warmup_ratio warmup_steps weight_decay",
}


@pytest.mark.parametrize("section", RL_ONLY)
def test_each_setting_of_a_shared_section_is_used_or_refused(section: str) -> None:
    names = annotations_of(annotations_of(SftConfig)[section])

    assert {*SHARED[section].split(), *RL_ONLY[section]} == names.keys()


def test_an_empty_value_unsets_an_optional_setting() -> None:
    assert config("sft.max_len=8").sft.max_len == 8
    assert config("sft.max_len=", sft={"max_len": 8}).sft.max_len is None


def test_the_example_of_the_page_is_a_config() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)

    found = check_config(SftConfig, tomllib.loads(example), "example")

    assert found.with_steps(1000).train.total_steps == 32  # 2 passes, 64 rows a step


def test_answers_whose_end_is_no_end_token_of_the_model_are_warned_of(tmp_path: Path) -> None:
    save_model(tmp_path)
    data, warnings = tmp_path / "rows.jsonl", list[str]()
    data.write_text(json.dumps({"messages": [*CHAT[:1], {"role": "assistant", "content": "2"}]}))

    read_rows(config(model={"path": tmp_path}, data={"train": data}), warnings.append)

    (warning,) = warnings
    assert "no row has an end token ('<eos>') among those to learn" in warning
    assert "eos_token_id in generation_config.json of model.path" in warning


def test_epochs_become_steps() -> None:
    found = config("train.steps=", "train.epochs=1.1", "sft.batch_size=4")

    assert found.with_steps(40).train.total_steps == 11
    assert found.with_steps(41).train.total_steps == 12
