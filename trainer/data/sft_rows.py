"""Turns the rows of a data set into tokens, and which of them supervised fine-tuning learns.

    plain prompt + completion    prompt | completion, end token
    chat                         ... | assistant's message, end token | ... | ...

A call of a tool is a part of the assistant's message; the tool's answer is another message. Learned
parts are tokenized apart from the text before them, as engines generate them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import DataError
from umbra.runtime.text.messages import are_messages, normal_messages
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.sft_config import SftSection
from umbra.trainer.config.trainer_config import DataSection
from umbra.trainer.data.data_rows import read_rows
from umbra.trainer.data.prompt_content import (
    check_template,
    given_chat,
    no_column,
    prompt_content,
    row_variables,
)

_COMPLETION = "sft.completion_column"
_TEXTS = ("content", "reasoning_content", "thinking", "reasoning")
"""The keys of a message under which chats have what the assistant writes."""
_MARKS = ("weight", "loss", "train", "trainable")
"""The keys by which data sets mark messages that are not learned: with 0 or false."""


@dataclass(frozen=True, slots=True)
class SftRow:
    """T: tokens of the row."""

    tokens: NDArray[np.int32]  # [T]
    mask: NDArray[np.uint8]  # [T], 1 where learned; never the first


@dataclass(frozen=True, slots=True)
class _Text:
    """A plain prompt and what follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class _Chat:
    messages: Sequence[dict[str, Any]]
    learned: Sequence[int]  # indices of messages, all the assistant's; at least one
    variables: Mapping[str, Any]  # of the chat template, such as tools


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRows:
    """Reads rows by the settings of a run."""

    data: DataSection
    sft: SftSection
    max_len: int

    def check(self, path: Path, key: str) -> None:
        """Checks the first row, without a tokenizer. Raises DataError."""
        first = next(read_rows(path), None)
        if first is None:
            raise DataError(f"{key}: {path} is empty: it has no rows")
        self._content(*first)

    def read(self, path: Path, tokenizer: ModelTokenizer) -> Iterator[SftRow | None]:
        """The rows of a file; None for one that `data.overlong` leaves out. Raises DataError with
        file, line, cause and remedy."""
        for where, row in read_rows(path):
            yield self._fitted(where, self.tokenize(where, row, tokenizer))

    def tokenize(self, where: str, row: Mapping[str, Any], tokenizer: ModelTokenizer) -> SftRow:
        """The whole row, however long. `where` names it in errors."""
        content = self._content(where, row)
        if isinstance(content, _Text):
            found = _tokenize_text(content, tokenizer)
        else:
            try:
                found = _tokenize_chat(content, tokenizer)
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
        if not found.mask.any():
            raise DataError(f"{where}: there is no token to learn: leave the row out")
        return found

    def _fitted(self, where: str, row: SftRow) -> SftRow | None:
        if len(row.tokens) <= self.max_len:
            return row
        match self.data.overlong:
            case "drop":
                return None
            case "truncate":
                cut = SftRow(row.tokens[: self.max_len], row.mask[: self.max_len])
                return cut if cut.mask.any() else None
            case "error":
                raise DataError(
                    f"{where}: the row has {len(row.tokens)} tokens, more than sft.max_len = "
                    f"{self.max_len}: raise it, or set data.overlong to 'drop' or 'truncate'"
                )

    def _content(self, where: str, row: Mapping[str, Any]) -> _Text | _Chat:
        found = prompt_content(replace(self.data, continue_final_message=True), where, row)
        column = self.sft.completion_column
        completion = row.get(column)
        if isinstance(found, str):
            if column not in row:
                raise no_column(column, where, row, _COMPLETION)
            if completion is None:
                raise DataError(
                    f"{where}: column {column!r} ({_COMPLETION}) is null: leave the row out"
                )
            if not isinstance(completion, str):
                raise DataError(
                    f"{where}: the prompt is text, and column {column!r} holds a "
                    f"{type(completion).__name__}: give text there, too, or a chat as the prompt"
                )
            return _Text(found, completion)
        try:
            return self._chat(found, completion, row_variables(self.data, row))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None

    def _chat(
        self, prompt: list[dict[str, Any]], completion: object, variables: Mapping[str, Any]
    ) -> _Chat:
        column, messages, first = self.sft.completion_column, prompt, 0
        if completion is not None:
            if prompt[-1]["role"] == "assistant":
                raise DataError(
                    f"the chat ends with the assistant's message, and column {column!r} holds "
                    f"another ({_COMPLETION}): leave one of them out"
                )
            if isinstance(completion, str):
                only_one = [{"role": "assistant", "content": completion}]
                completion = given_chat(completion) or only_one
            if not are_messages(completion):
                raise DataError(f"column {column!r} is neither text nor messages")
            given = cast("list[object]", completion)
            messages = [*prompt, *normal_messages(given, continue_final_message=True)]
            first = len(prompt)
        learned = [
            first + idx
            for idx, message in enumerate(messages[first:])
            if message["role"] == "assistant" and all(message.get(key, 1) for key in _MARKS)
        ]
        if not learned:
            raise DataError(
                "no message of the assistant, or each has a weight of 0, and so nothing to learn: "
                f"give one as the last message or in column {column!r} ({_COMPLETION}), or leave "
                "the row out"
            )
        return _Chat(messages, learned if self.sft.loss_on == "all" else learned[-1:], variables)


def _tokenize_text(text: _Text, tokenizer: ModelTokenizer) -> SftRow:
    """The completion ends with an end token, as an engine's does."""
    prompt, end = tokenizer.encode_prompt(text.prompt), tokenizer.state.eos_token_id
    completion = tokenizer.encode_more(text.completion, *prompt[-1:])
    if end is not None and completion[-1:] != [end]:
        completion.append(end)
    tokens = [*prompt, *completion]
    return _row(tokens, [(len(prompt), len(tokens))])


def _row(tokens: Sequence[int], learned: Sequence[tuple[int, int]]) -> SftRow:
    mask = np.zeros(len(tokens), np.uint8)
    for start, stop in learned:
        mask[start:stop] = 1
    mask[:1] = 0  # nothing predicts it
    return SftRow(np.asarray(tokens, np.int32), mask)


def _tokenize_chat(chat: _Chat, tokenizer: ModelTokenizer) -> SftRow:
    check_template(tokenizer, chat.messages, chat.variables)
    find = _marked_spans if tokenizer.marks_generation else _prefix_spans
    text, spans = find(chat, tokenizer)
    tokens, learned = list[int](), list[tuple[int, int]]()

    def append(part: str) -> Sequence[int]:
        found = tokenizer.encode_more(part, tokens[-1]) if tokens else tokenizer.encode(part)
        tokens.extend(found)
        return found

    end = 0
    for idx, marked in zip(chat.learned, spans, strict=True):
        first, last = marked[0][0], marked[-1][1]
        if missing := _left_out(chat.messages[idx], text[end:first], text[first:last]):
            raise DataError(
                f"message {idx + 1} (assistant): the chat template of "
                f"{tokenizer.state.model_path} leaves out its {missing}, so that it would not be "
                "learned: use a template that has it, or leave it out of the row"
            )
        for start, stop in marked:
            append(text[end:start])
            num_before, turn = len(tokens), append(text[start:stop])
            num_learned = len(turn)
            if not tokenizer.marks_generation:
                num_learned = _num_until_end(turn, tokenizer.end_token_ids)
            learned.append((num_before, num_before + num_learned))
            end = stop
    append(text[end:])
    whole = tokenizer.encode(text)
    if tokens != whole and tokenizer.decode_all(tokens) != tokenizer.decode_all(whole):
        raise DataError(
            "the tokenizer adds something to a part of the chat that it does not add within the "
            "whole, so that the assistant's messages have no tokens of their own: use plain "
            "prompts and completions for this model"
        )
    return _row(tokens, learned)


def _left_out(message: Mapping[str, Any], before: str, turn: str) -> str:
    """The first key of a message whose text is not in its learned `turn`, but for spaces. It may
    begin `before` that, as reasoning does that the template has begun."""
    begun, shown = "".join(before.split()), "".join(turn.split())
    for key in _TEXTS:
        value = message.get(key)
        text = "".join(value.split()) if isinstance(value, str) else ""
        if text not in begun[max(0, len(begun) - len(text) + 1) :] + shown:
            return key
    return ""


def _num_until_end(turn: Sequence[int], end_token_ids: Sequence[int]) -> int:
    """How many tokens an engine generates of a turn: templates put a line break behind the end."""
    ends = [idx for idx, token in enumerate(turn, 1) if token in end_token_ids]
    return ends[-1] if ends else len(turn)


def _marked_spans(
    chat: _Chat, tokenizer: ModelTokenizer
) -> tuple[str, list[list[tuple[int, int]]]]:
    """A message is what the template marks of it, in one part or several."""
    text, spans = tokenizer.render_marked(chat.messages, chat.variables)
    turns = [idx for idx, message in enumerate(chat.messages) if message["role"] == "assistant"]
    starts = [start for start, _ in spans]
    if len(spans) > len(turns):
        before = (
            tokenizer.render_whole(chat.messages[:idx], chat.variables, asks_for_answer=False)
            for idx in turns[1:]
        )
        common = (commonprefix([text, part]) for part in before)  # noqa: RUF071  texts
        starts = [0, *map(len, common)]
    marked: dict[int, list[tuple[int, int]]] = {idx: [] for idx in turns}
    for span in spans:
        marked[turns[bisect_right(starts, span[0]) - 1]].append(span)
    if not all(marked.values()):
        raise DataError(
            f"the chat template marks {len(spans)} parts as generated, and the chat has "
            f"{len(turns)} messages of the assistant: give each its own {{% generation %}} block"
        )
    return text, [marked[idx] for idx in chat.learned]


def _prefix_spans(
    chat: _Chat, tokenizer: ModelTokenizer
) -> tuple[str, list[list[tuple[int, int]]]]:
    """A message is what its rendering adds to that of the messages before it."""

    def render(num_messages: int, *, asks_for_answer: bool) -> str:
        before = chat.messages[:num_messages]
        return tokenizer.render_whole(before, chat.variables, asks_for_answer=asks_for_answer)

    text = render(len(chat.messages), asks_for_answer=False)
    if chat.learned[0] == 0:
        raise DataError(
            "message 1 (assistant) has nothing before it, so that its tokens are not known: give "
            "it a weight of 0 to learn the others, or mark the assistant's messages in the "
            "template with {% generation %}"
        )
    spans: list[list[tuple[int, int]]] = []
    for idx in chat.learned:
        before = render(idx, asks_for_answer=True)
        through = render(idx + 1, asks_for_answer=False)
        if not text.startswith(through):  # Phi-3's template puts it behind the whole chat
            through = through.removesuffix(tokenizer.state.special_tokens.get("eos_token", ""))
        if not (text.startswith(through) and through.startswith(before)):
            asked = render(idx, asks_for_answer=False)
            begins = before.startswith(asked) and through.startswith(asked)
            problem = (
                "renders it, or what is before it, differently within the whole chat than at its "
                "end, so that its tokens are not known: "
            )
            if begins and not through.startswith(before):
                problem = (
                    f"asks for an answer by {before[len(asked) :]!r:.80}, and renders this one as "
                    f"{through[len(asked) :]!r:.80}: let data.chat_template_kwargs begin both "
                    "alike, such as enable_thinking = false for answers without reasoning, or "
                )
            elif idx != chat.learned[-1]:
                problem += "set sft.loss_on = 'last' if that is enough, or "
            raise DataError(
                f"message {idx + 1} (assistant): the chat template {problem}mark the assistant's "
                "messages in the template with {% generation %}"
            )
        spans.append([(len(before), len(through))])
    return text, spans
