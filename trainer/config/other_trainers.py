"""Answers an unknown setting that another trainer has by what umbra has instead.

other_trainers.toml has the full names; a user may write the end of one, or put it into one of
umbra's sections: `train.beta`, `optim.lr`, `rollout.val_kwargs.n`.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

_NEAREST: Final = "~ "
_ABSENT: Final = "umbra does not have it; see docs/coming-from.md"

_Name = tuple[str, ...]


@cache
def other_names() -> Mapping[str, Mapping[str, str]]:
    """The counterparts in umbra of each full name, by trainer."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def other_trainers_hint(location: Sequence[str], value: Any, *, is_known: bool = False) -> str:
    """The counterpart in umbra of an unknown setting, or "". A table as `value` is a section there,
    such as verl's `actor_rollout_ref`: its settings count. With `is_known`, a section of umbra has
    a setting of the same name, so the name alone does not mean another trainer's."""
    hints: dict[str, None] = {}
    for name in _names(tuple(part.lstrip("+").replace("-", "_") for part in location), value):
        if len(name) > 1 or not is_known:
            hints[_hint(name) or ("" if is_known else _hint(name[1:]))] = None
    return "; ".join(filter(None, hints))


def _names(name: _Name, value: Any) -> Iterator[_Name]:
    if not isinstance(value, Mapping) or not value:
        yield name
        return
    for key, inner in cast("Mapping[str, Any]", value).items():
        yield from _names((*name, key.replace("-", "_")), inner)


class _Match(NamedTuple):
    """A full name that may be meant. Greater ones are closer: they share more parts with the user's
    name, and have fewer others."""

    num_shared: int
    num_others: int
    answer: str


def _hint(name: _Name) -> str:
    closest: dict[str, _Match] = {}
    for trainer, answers in other_names().items():
        for full, answer in answers.items():
            match = _match(name, tuple(full.split(".")), answer)
            if match is not None and match > closest.get(trainer, _Match(0, 0, "")):
                closest[trainer] = match
    num_shared = max((match.num_shared for match in closest.values()), default=0)
    trainers = defaultdict[str, list[str]](list)
    for trainer, match in closest.items():
        if match.num_shared == num_shared:
            trainers[match.answer].append(trainer)
    return "; ".join(
        f"{'.'.join(name)!r} of {' and '.join(whose)}: {_worded(answer)}"
        for answer, whose in trainers.items()
    )


def _match(name: _Name, full: _Name, answer: str) -> _Match | None:
    """The name is the end of the full one, or something below it."""
    for num_shared in range(min(len(name), len(full)), 0, -1):
        # A single part, such as "model", shows no section if it is only the end of the full name.
        is_enough = num_shared > 1 or num_shared in (len(name), len(full))
        if is_enough and full[-num_shared:] == name[:num_shared]:
            return _Match(num_shared, num_shared - len(full), answer)
    return None


def _worded(answer: str) -> str:
    if not answer:
        return _ABSENT
    settings = " and ".join(map(repr, answer.removeprefix(_NEAREST).split(", ")))
    is_nearest = answer.startswith(_NEAREST)
    return f"not in umbra; nearest is {settings}" if is_nearest else f"use {settings}"
