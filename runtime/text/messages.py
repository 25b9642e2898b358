from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from umbra.runtime.errors import DataError


def normal_messages(
    messages: Sequence[object], *, continue_final_message: bool
) -> list[dict[str, Any]]:
    """Messages of a chat without null keys and empty lists of calls, each content as one text, and
    the arguments of tool calls as objects. The last message may be the assistant's only with
    `continue_final_message`. Raises DataError if something is no message, or its content is not
    text."""
    if not messages:
        raise DataError("the chat has no messages")
    found = [_normal(message, number) for number, message in enumerate(messages, 1)]
    if found[-1]["role"] == "assistant" and not continue_final_message:
        raise DataError(
            f"message {len(found)} (assistant) is the last one, so the prompt would hold the "
            "answer: remove it, or set continue_final_message to have the model continue it"
        )
    return found


def are_messages(value: object) -> bool:
    """Whether a value is a list of objects with a role, and therefore meant as a chat."""
    items = cast("Sequence[object]", value) if isinstance(value, list) else ()
    return bool(items) and all(isinstance(item, dict) and "role" in item for item in items)


def _normal(message: object, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"message {number} is a {type(message).__name__}, not an object")
    given = cast("Mapping[str, Any]", message)
    found = {key: value for key, value in given.items() if value is not None}
    if found.get("tool_calls") == []:  # some templates ask whether there is such a key
        del found["tool_calls"]
    role = found.get("role")
    if not isinstance(role, str):
        raise DataError(f"message {number} has no role that is text; it has {sorted(found)}")
    name = f"message {number} ({role})"
    if "tool_calls" in found:
        found["tool_calls"] = _tool_calls(found["tool_calls"], name)
    if "content" in found:
        found["content"] = _text(found["content"], name)
    elif role != "assistant" or len(found) == 1:  # a call of a tool has no content
        raise DataError(f"{name} has no content")
    return found


def named_function(value: object) -> dict[str, Any] | None:
    """The function of a tool or of a call, which some data sets have bare; None without a name."""
    found = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    function: Any = found.get("function", found)
    is_named = isinstance(function, dict) and "name" in function
    return dict(cast("dict[str, Any]", function)) if is_named else None


def _tool_calls(calls: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise DataError(f"{name}: its tool_calls are a {type(calls).__name__}, not a list")
    numbered = enumerate(cast("list[object]", calls), 1)
    return [_tool_call(call, f"{name}: call {idx} of its tool_calls") for idx, call in numbered]


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    """Chat templates expect arguments as an object, and engines give them one. The OpenAI API and
    its data sets have them as JSON text."""
    function = named_function(call)
    if function is None:
        raise DataError(f"{name} names no function: it is {call!r:.80}")
    arguments: object = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "null")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name} has arguments that are not JSON: {error}") from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise DataError(f"{name} has arguments that are no object: {arguments!r:.80}")
    function["arguments"] = arguments
    return {**call, "function": function} if "function" in call else function


def _text(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{name}: its content is a {type(content).__name__}, not text")
    return "".join(_part_text(part, name) for part in cast("list[object]", content))


def _part_text(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    fields = cast("dict[str, object]", part) if isinstance(part, dict) else {}
    text, kind = fields.get("text"), fields.get("type", "text")
    if kind != "text" or not isinstance(text, str):
        raise DataError(
            f"{name}: its content has the part {part!r:.80}: umbra works on text only, remove it"
        )
    return text
