"""The prompts of a run's earlier start, which a resume has to repeat: groups in progress and the
order of prompts refer to prompts by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import msgpack

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.prompts import Prompt, PromptSet

_SHOWN_LEN: Final = 60
"""Characters of each prompt in an error: enough to recognise it in its file."""
_EARLIER_LEN: Final = 20  # of them, before the first difference


class KeptPrompts:
    """Compares prompts with the ones in the prompt files that the earlier start wrote to `folder`;
    a missing file accepts all. `remedy` says what to do instead of a resume with other data; `note`
    shows a line to the operator."""

    def __init__(self, folder: Path, remedy: str, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._remedy = remedy
        self._note = note

    def unchanged(
        self, prompts: Iterator[dict[str, Any]], name: str, source: str
    ) -> Iterator[dict[str, Any]]:
        """Passes on training prompts; notes the first one of which only other columns differ.
        Raises DataError at the first prompt that differs. `name` is the prompt file's; messages
        name `source`, the setting and the file of the prompts."""
        if not (self._folder / name).exists():
            yield from prompts
            return
        column = ""
        for idx, (before, now) in enumerate(self._pairs(prompts, name)):
            if difference := _difference(before, now):
                raise DataError(
                    f"{source}, prompt {idx + 1}: {difference}. Groups, rewards and the order of "
                    "the prompts that the run keeps belong to the data that it began with: restore "
                    "it, and the settings that make prompts of it ([data], model.path, "
                    f"rollout.max_new_tokens, pool.max_context_len), or {self._remedy}"
                )
            assert now is not None
            if not column:
                assert before is not None
                column = _changed_column(before.row, now["row"])
                if column:
                    self._note(
                        f"warning: {source}, prompt {idx + 1} (id {now['id']!r}): {column} changed "
                        "since the run's last start: rewards that groups already have stay as "
                        "they are"
                    )
            yield now

    def noted(
        self, prompts: Iterator[dict[str, Any]], name: str, source: str
    ) -> Iterator[dict[str, Any]]:
        """Passes on held-out prompts, of which a run keeps only scores; notes the first change."""
        if not (self._folder / name).exists():
            yield from prompts
            return
        is_noted = False
        for idx, (before, now) in enumerate(self._pairs(prompts, name)):
            if not is_noted and (difference := _difference(before, now)):
                is_noted = True
                self._note(
                    f"warning: {source}, prompt {idx + 1}: {difference}: evaluations before and "
                    "after this start are of different prompts"
                )
            if now is not None:
                yield now

    def _pairs(
        self, prompts: Iterator[dict[str, Any]], name: str
    ) -> Iterator[tuple[Prompt | None, dict[str, Any] | None]]:
        earlier = PromptSet.open(self._folder / name)
        try:
            yield from zip_longest((earlier[idx] for idx in range(len(earlier))), prompts)
        finally:
            earlier.close()


def _difference(before: Prompt | None, now: dict[str, Any] | None) -> str:
    if before is None:
        assert now is not None
        return f"it is new (id {now['id']!r}): {now['prompt'][:_SHOWN_LEN]!r}"
    if now is None:
        return f"it is missing: {before.text[:_SHOWN_LEN]!r} (id {before.prompt_id!r})"
    if before.text != now["prompt"]:
        start = _first_difference(before.text, now["prompt"])
        return f"it is {_shown(now['prompt'], start)} and was {_shown(before.text, start)}"
    if before.prompt_id != now["id"]:
        return f"its id is {now['id']!r} and was {before.prompt_id!r}"
    if before.tokens.astype("<i4").tobytes() != now["tokens"]:
        return (
            f"{now['prompt'][:_SHOWN_LEN]!r} has {len(now['tokens']) // 4} tokens and had "
            f"{len(before.tokens)} others: the tokenizer changed"
        )
    return ""


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((idx for idx, (a, b) in pairs if a != b), min(len(one), len(other)))


def _shown(text: str, difference: int) -> str:
    start = max(0, difference - _EARLIER_LEN)
    return f"{'…' * (start > 0)}{text[start : start + _SHOWN_LEN]!r}"


def _changed_column(before: dict[str, Any], now: dict[str, Any]) -> str:
    if msgpack.packb(before) == msgpack.packb(now):  # unlike ==, this takes NaN for equal to NaN
        return ""
    pairs = ((name, before.get(name), now.get(name)) for name in (*before, *now))
    changed = [name for name, one, other in pairs if msgpack.packb(one) != msgpack.packb(other)]
    return f"column {changed[0]!r}" if changed else ""
