from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Final, cast

from umbra.runtime.errors import DataError
from umbra.runtime.text.messages import are_messages, named_function, normal_messages
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.trainer_config import DataSection, template_columns

_PROMPT: Final = "data.prompt_column"
_MESSAGES: Final = "data.messages_column"
SUCCESSFUL: Final = "\ue000successful completion\ue000"
"""Stands for {successful_completion} in a teacher's prompt; characters that no text has."""
VARIABLES: Final = "chat_template_kwargs"
_MEDIA_COLUMNS: Final = ("image", "images", "video", "videos", "audio", "audios")


def prompt_content(
    data: DataSection, where: str, row: Mapping[str, Any]
) -> str | list[dict[str, Any]]:
    """A row's prompt: text, or the messages of a chat in their normal form. Raises DataError, with
    `where`, cause and remedy, if there is none or it is not clear."""
    if data.template:
        found = _filled("template", data.template, where, row)
        found = [{"role": "user", "content": found}] if data.format == "chat" else found
    else:
        found = _given(data, where, row)
    if isinstance(found, str):
        if data.system_prompt:
            raise DataError(
                f"{where}: data.system_prompt needs a chat, and this prompt is plain text: set "
                "data.format = 'chat' and data.messages_column to the text's column, which makes "
                "the text a user's message, or put the system prompt into the text"
            )
        return found
    try:
        return normal_messages(
            _with_system_prompt(data, found), continue_final_message=data.continue_final_message
        )
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def teacher_content(
    data: DataSection, where: str, row: Mapping[str, Any], content: str | list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    """The teacher's prompt: `data.teacher_template`, filled with a row and its `content`."""

    def privileged(prompt: str) -> str:
        given = {**row, "prompt": prompt, "successful_completion": SUCCESSFUL}
        return _filled("teacher_template", data.teacher_template, where, given)

    if isinstance(content, str):
        return privileged(content)
    asked = [message for message in content if message["role"] == "user"][-1:]
    if not asked:
        raise DataError(
            f"{where}: data.teacher_template needs a message of a user, and the chat has none"
        )
    changed = {**asked[0], "content": privileged(asked[0]["content"])}
    return [changed if message is asked[0] else message for message in content]


def no_column(
    column: str, where: str, row: Mapping[str, Any], key: str, also: str = ""
) -> DataError:
    """The error about a column that a row lacks; `key` is the setting that names it."""
    similar = get_close_matches(column, row, n=1)
    hint = f", did you mean {similar[0]!r}?" if similar else ""
    return DataError(
        f"{where}: no column {column!r}{also}; its columns are {', '.join(map(repr, row))}: "
        f"set {key}{hint}"
    )


def given_chat(value: object) -> list[Any] | None:
    """The messages that a column holds, also as JSON text; None if it holds something else."""
    found = _from_json(value)
    return cast("list[Any]", found) if are_messages(found) else None


def row_variables(data: DataSection, row: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template besides the messages: those of the setting, of the row's
    column of that name, and its tools. Raises DataError if a column holds something else."""
    tools, own = (_from_json(row.get(name)) for name in (data.tools_column, VARIABLES))
    found = cast("list[Any]", tools if isinstance(tools, list) else [tools] * bool(tools))
    if odd := [tool for tool in found if named_function(tool) is None]:
        raise DataError(
            f"column {data.tools_column!r} (data.tools_column) holds {odd[0]!r:.80}, which is no "
            "schema of a function: correct it, or set data.tools_column = '' if the chat has none"
        )
    if not isinstance(own or {}, dict):
        raise DataError(
            f"column {VARIABLES!r} holds {own!r:.80}, not variables of the chat template by name: "
            "correct or rename it"
        )
    return {**data.chat_template_kwargs, **(own or {}), **({"tools": found} if found else {})}


def _from_json(value: object) -> Any:
    """A value of a column, which some data sets have as JSON text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def check_template(
    tokenizer: ModelTokenizer,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> None:
    """Raises DataError if the chat template leaves out a row's tools, or calls of them."""
    template = tokenizer.state.chat_template
    calls = any("tool_calls" in message for message in messages)
    given = {"tools": "tools" in variables, "tool_calls": calls}
    for name, remedy in (
        ("tools", "set data.tools_column = ''"),
        ("tool_calls", "leave the row out"),
    ):
        if given[name] and template and name not in template:
            raise DataError(
                f"the row has {name}, and the chat template of {tokenizer.state.model_path} leaves "
                f"them out: use a template with {name!r}, or {remedy}"
            )


def _given(data: DataSection, where: str, row: Mapping[str, Any]) -> str | list[Any]:
    column, key = _column(data, where, row)
    for name in _MEDIA_COLUMNS:
        if name != column and row.get(name):
            raise DataError(
                f"{where}: column {name!r} is not empty, and umbra trains on text only: leave such "
                "rows out, or name the columns of the prompt in data.template if they are enough"
            )
    value = row[column]
    chat = None if data.format == "text" else given_chat(value)
    if chat is not None:
        return chat
    if not isinstance(value, str):
        is_chat = data.format == "text" and are_messages(value)
        hint = ": set data.format = 'chat'" if is_chat else ""
        kind = "list of objects with 'role' and 'content'" if key == _MESSAGES else "text"
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}, not {kind}{hint}"
        )
    if data.format == "chat":
        return [{"role": "user", "content": value}]
    if key == _MESSAGES:
        raise DataError(
            f"{where}: {column!r} must be a list of objects with 'role' and 'content', got "
            f"{value!r:.80}; set data.format = 'chat' to take texts as users' messages"
        )
    return value


def _column(data: DataSection, where: str, row: Mapping[str, Any]) -> tuple[str, str]:
    prompt, messages = (data.prompt_column, _PROMPT), (data.messages_column, _MESSAGES)
    if data.format != "auto":
        chosen = messages if data.format == "chat" else prompt
        if chosen[0] not in row:
            raise no_column(chosen[0], where, row, chosen[1])
        return chosen
    present = [each for each in (messages, prompt) if row.get(each[0]) is not None]
    if len(present) == 2 and prompt[0] != messages[0]:
        raise DataError(
            f"{where}: both {prompt[0]!r} and {messages[0]!r} could be the prompt: set data.format "
            "= 'text' or 'chat'"
        )
    if not present:
        if prompt[0] in row:
            return prompt
        raise no_column(prompt[0], where, row, _PROMPT, f" nor {messages[0]!r}")
    return present[0]


def _with_system_prompt(data: DataSection, messages: list[Any]) -> list[Any]:
    if not data.system_prompt:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            "message 1 is a system message, and data.system_prompt would be another: leave one of "
            "them out"
        )
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _filled(key: str, template: str, where: str, row: Mapping[str, Any]) -> str:
    columns = template_columns(template)
    for name in columns:
        if name not in row:
            raise no_column(name, where, row, f"data.{key}")
        if not isinstance(row[name], str | int | float):
            kind = type(row[name]).__name__
            raise DataError(
                f"{where}: column {name!r} of data.{key} holds a {kind}, not text or a number"
            )
    try:
        return template.format(**{name: row[name] for name in columns})
    except (ValueError, KeyError) as error:  # a format such as {price:.2f}, and a text as the price
        raise DataError(
            f"{where}: data.{key} {template!r} cannot be filled ({error}): its formats do not fit "
            "the columns"
        ) from None
