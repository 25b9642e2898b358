"""Reads a TOML config with command-line overrides, and words its errors."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import re
import tomllib
import types
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import CREDENTIAL, MASK, annotations_of
from umbra.trainer.config.setting_rules import refusals
from umbra.trainer.config.sft_config import RL_ONLY, SftConfig
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig

_WORDS: Final = {
    "dataclass_type": "should be a section",
    "dict_type": "should be a table",
    "string_type": "should be text",
    "tuple_type": "should be a list in brackets",
}
"""Replace messages of pydantic that speak of Python types."""
_SURE_RATIO: Final = 0.8
"""Similarity from which a key of another section is suggested. Lower suggests unrelated keys."""
_EMPTY: Final[tuple[Any, ...]] = (None, "", {}, ())
"""Defaults of optional settings: an empty value removes such a setting."""

_SECTIONS: Final = annotations_of(SftConfig) | annotations_of(TrainerConfig)
_Config = TypeVar("_Config", TrainerConfig, ServeConfig, SftConfig)
_NEAREST: Final = "~ "
_OTHER: Final[Mapping[type, str]] = {SftConfig: "RL training", TrainerConfig: "SFT"}
_LISTED: Final = " (docs/configuration.md lists all)"
_MAX_SUGGESTED: Final = 3
_ABSENT: Final = "umbra does not have it; see docs/coming-from.md"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    return read_config(TrainerConfig, path, overrides)


def load_any_config(path: str, overrides: Sequence[str]) -> TrainerConfig | SftConfig:
    """A config of fine-tuning if there is a section [sft], else one of RL training."""
    values = _read_toml(Path(path))
    is_sft = "sft" in values or any(given.startswith("sft.") for given in overrides)
    if is_sft:
        return check_config(SftConfig, values, path, overrides)
    return check_config(TrainerConfig, values, path, overrides)


def read_config(kind: type[_Config], path: str | Path, overrides: Sequence[str] = ()) -> _Config:
    """Reads `path`; `overrides` ("section.key=value", values as in TOML) replace its values. Raises
    ConfigError if the file is missing or not TOML, an override is malformed, or settings are wrong.
    The message names each wrong key, what is allowed, and a close match."""
    return check_config(kind, _read_toml(Path(path)), str(path), overrides)


def _read_toml(place: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "; the config file comes before settings" if "=" in place.name else ""
        raise ConfigError(
            f"config file {place.absolute()} cannot be read: {error.strerror}{hint}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {place} is not valid TOML: {error}") from error


def check_config(
    kind: type[_Config], values: Mapping[str, Any], source: str, overrides: Sequence[str] = ()
) -> _Config:
    """Checks the values of a config, with `overrides` in their place. Leaves out what is wrong and
    checks the rest: the error has a line for each problem that does not follow from another."""
    problems: dict[str, None] = {}
    parsed: list[Override] = []
    changed = copy.deepcopy(dict(values))
    for given in overrides:
        try:
            override = Override.parse(given)
            override.apply_to(changed)
            parsed.append(override)
        except ConfigError as error:
            problems[str(error)] = None
    unclear = [""] * bool(problems)  # settings and sections that are not as meant; "" is all
    while True:
        try:
            # As JSON, lists become tuples and text becomes paths; all else keeps its type. A date
            # or time becomes text, which no number or truth value takes.
            config = TypeAdapter(kind).validate_json(json.dumps(changed, default=str))
            break
        except ValidationError as error:
            found = [
                each for each in error.errors(include_url=False) if not _follows(each, unclear)
            ]
        for problem in found:
            behind = overrides_behind(problem, parsed, values)
            problems[_sourced(_describe(problem, kind), source, behind)] = None
        left_out = [name for problem in found if (name := _leave_out(problem, changed)) is not None]
        if not left_out:
            raise ConfigError("\n".join(problems))
        unclear += left_out
    if not isinstance(config, ServeConfig):
        for rule in refusals(config):
            if not any(_overlap(name, other) for name in rule.settings for other in unclear):
                behind = overrides_of(rule.settings, parsed, values)
                problems[_sourced(rule.message(config), source, behind)] = None
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _follows(problem: Any, unclear: Sequence[str]) -> bool:
    """Whether a setting is missing because it was left out."""
    return problem["type"] == "missing" and _dotted(problem["loc"]) in unclear


def _leave_out(problem: Any, values: dict[str, Any]) -> str | None:
    """Removes what a pydantic error is about: a setting, or the section that lacks one. Returns
    what is unclear then, for an unknown name its section; None if there is nothing to remove."""
    location: tuple[int | str, ...] = problem["loc"]
    if problem["type"] == "missing":
        location = location[:-1]
    table: Any = values
    for depth, key in enumerate(location, 1):
        if not isinstance(table, dict) or key not in table:
            return None
        inner: Any = cast("dict[int | str, Any]", table)[key]
        if depth == len(location) or not isinstance(inner, dict):
            del table[key]
            is_unknown = problem["type"] == "unexpected_keyword_argument"
            return _dotted(location[: depth - is_unknown])
        table = cast("Any", inner)
    return None


def _dotted(location: Sequence[int | str]) -> str:
    return ".".join(map(str, location))


def _sourced(text: str, source: str, behind: Sequence[Override]) -> str:
    if not behind:
        return f"{source}: {text}"
    given = " ".join(override.shown for override in behind)
    return f"{given} (command line): {text.removeprefix(f'{behind[0].key}: ')}"


def _describe(problem: Any, kind: type) -> str:
    """One pydantic error as `key: what is wrong, what is allowed`."""
    location: tuple[int | str, ...] = problem["loc"]
    key = _dotted(location)
    match problem["type"]:
        case "unexpected_keyword_argument":
            return f"{key} is unknown{_unknown_hint(location, problem['input'], kind)}"
        case "missing":
            return f"{key if len(location) > 1 else f'section [{key}]'} is missing"
        case "literal_error":
            return f"{key}: {_lower_first(problem['msg'])}{_close_literal(problem)}"
        case "value_error":
            return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
        case _:
            words = _WORDS.get(problem["type"], _lower_first(problem["msg"]))
            return f"{key}: {words}{'' if _is_secret(location) else _shown(problem['input'])}"


def _is_secret(keys: Sequence[int | str]) -> bool:
    """Whether a value may be a credential, which no message and no log may have."""
    return "env" in keys[1:] or CREDENTIAL.search(str(keys[-1])) is not None


def _shown(given: object) -> str:
    if isinstance(given, str | int | float | bool):
        return f", got {given!r}"
    if isinstance(given, dict):
        return ", got a table"
    return ", got a list" if isinstance(given, list) else ""


def _unknown_hint(location: tuple[int | str, ...], given: Any, kind: type) -> str:
    kind = SftConfig if kind is SftConfig else TrainerConfig
    if location[0] in _SECTIONS and location[0] not in annotations_of(kind):
        uses = "python -m umbra.trainer" + ".sft" * (location[0] == "sft")
        return f" here: only `{uses}` uses it, leave it out"
    section: Any = kind
    for part in location[:-1]:
        section = inner_annotation(section, part)
    names = [str(part) for part in location]
    key = names[-1]
    known = [name for name in annotations_of(section) if _is_used([*names[:-1], name], kind)]
    # An auxiliary pool has settings of its own, whatever other sections and trainers call theirs.
    elsewhere = {} if names[0] == "pools" and len(names) > 2 else _settings(kind)
    found = elsewhere.get(key, [])
    if elsewhere and (hint := other_trainers_hint(names, given, kind)):
        return f"; {hint}{_LISTED}"
    if len(found) != 1:
        alike = sorted(known, key=lambda name: -_num_shared(key, name))
        close = [name for name in alike[:_MAX_SUGGESTED] if _num_shared(key, name)]
        close = close or difflib.get_close_matches(key, known, n=_MAX_SUGGESTED)
        similar = difflib.get_close_matches(key, list(elsewhere), n=1, cutoff=_SURE_RATIO)
        found = close or found or [name for near in similar for name in elsewhere[near]]
    hint = f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
    return hint + _LISTED


def _num_shared(one: str, other: str) -> int:
    """Characters of the shorter name if the other begins or ends with it, as ema_decay with ema."""
    short, long = sorted((f"_{one}_", f"_{other}_"), key=len)
    return len(short) if long.startswith(short) or long.endswith(short) else 0


def _is_used(names: Sequence[str], kind: type) -> bool:
    """Whether the training of a kind of config has a use for a setting."""
    if names[0] not in annotations_of(kind):
        return False
    return kind is not SftConfig or {*names[1:2]}.isdisjoint(RL_ONLY.get(names[0], ()))


def _settings(kind: type) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, section in annotations_of(kind).items():
        for field in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
            if _is_used([name, field.name], kind):
                found.setdefault(field.name, []).append(f"{name}.{field.name}")
    return found


def _close_literal(problem: Any) -> str:
    given, expected = str(problem["input"]), str(problem["ctx"]["expected"])
    allowed = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    close = difflib.get_close_matches(given, allowed, n=1)
    return f", got {given!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


@dataclass(frozen=True, slots=True)
class Override:
    """One `section.key=value` argument."""

    given: str
    keys: tuple[str, ...]
    text: str

    @classmethod
    def parse(cls, given: str) -> Self:
        """Raises ConfigError if `given` has another form."""
        dotted, equals, text = given.partition("=")
        keys = tuple(dotted.strip().split("."))
        if not equals or not all(keys):
            raise ConfigError(f"override {given!r}: write it as section.key=value")
        override = cls(given.strip(), keys, text.strip())
        try:
            given.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"override {override.shown!r}: not UTF-8; write it in UTF-8, and rename a file "
                "that is not"
            ) from None
        return override

    @property
    def shown(self) -> str:
        """As given, but for a value that may be a credential."""
        return f"{self.key}={MASK}" if self.text and _is_secret(self.keys) else self.given

    @property
    def key(self) -> str:
        return ".".join(self.keys)

    def apply_to(self, values: dict[str, Any]) -> None:
        """Sets the value in `values`, or removes the setting if the value is empty and it is
        optional. Raises ConfigError for a setting that no section has, or an empty required one."""
        is_removed = not self.text and _may_be_left_out(self.keys)
        value = None if is_removed else self._value()
        table = values
        for key in self.keys[:-1]:
            inner: Any = table.get(key, {}) if is_removed else table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"override {self.shown!r}: {key} is a value, not a section")
            table = cast("dict[str, Any]", inner)
        if is_removed:
            table.pop(self.keys[-1], None)
        else:
            table[self.keys[-1]] = value

    def _value(self) -> Any:
        """A TOML value; or the bare text, if it is not TOML or the key takes text."""
        if not self.text and _is_setting(self.keys):
            raise ConfigError(
                f"{self.given} (command line): {self.key} cannot be unset; give it a value"
            )
        annotation = _annotation(self.keys)
        is_quoted = self.text[:1] in {'"', "'"}
        is_list = self.text[:1] == "[" and _takes(annotation, tuple)
        if not (is_quoted or is_list) and _takes(annotation, str, Path):
            return self.text
        try:
            return tomllib.loads(f"value = {self.text}")["value"]
        except tomllib.TOMLDecodeError:
            return self.text


def overrides_behind(
    problem: Any, overrides: Sequence[Override], file_values: Mapping[str, Any]
) -> list[Override]:
    """The overrides that caused one pydantic error; none if the file's own values did."""
    location = tuple(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        location = location[:-1]
    below = [
        one
        for one in _effective(overrides, file_values)
        if len(one.keys) > len(location) and one.keys[: len(location)] == location
    ]
    if problem["type"] == "value_error" and below:
        text = str(problem["ctx"]["error"])
        return [one for one in below if _is_named(one, text, file_values)]
    giving = [one for one in overrides if location[: len(one.keys)] == one.keys]
    if giving or _has(file_values, location):
        return giving[-1:]  # a later one replaces what came before
    return below


def overrides_of(
    settings: Sequence[str], overrides: Sequence[Override], file_values: Mapping[str, Any]
) -> list[Override]:
    """The overrides that change one of these settings, its section or its entries."""
    return [
        one
        for one in _effective(overrides, file_values)
        if any(_overlap(name, one.key) for name in settings)
    ]


def _effective(overrides: Sequence[Override], file_values: Mapping[str, Any]) -> list[Override]:
    """The last one of each key, unless it unsets what the file does not set either."""
    last = {one.keys: one for one in overrides}
    return [one for one in last.values() if one.text or _has(file_values, one.keys)]


def _overlap(one: str, other: str) -> bool:
    """Whether one is the other, or within it. Everything is within ""."""
    parts = zip(filter(None, one.split(".")), filter(None, other.split(".")), strict=False)
    return all(left == right for left, right in parts)


def _is_named(override: Override, text: str, file_values: Mapping[str, Any]) -> bool:
    """Whether an error about several settings names this one, or the table that it created."""
    is_new_table = not _has(file_values, override.keys[:-1])
    names = override.keys[-2:] if is_new_table else override.keys[-1:]
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)


def _has(values: Mapping[str, Any], location: Sequence[str]) -> bool:
    table: Any = values
    for part in location:
        if not isinstance(table, dict) or part not in table:
            return False
        table = cast("dict[str, Any]", table)[part]
    return True


def inner_annotation(annotation: Any, key: int | str) -> Any:
    """The annotation of `key` in a section or a table of sections; None if there is no such key."""
    if annotation is Any:
        return Any
    if _is_table(annotation):
        return _without_bounds(typing.get_args(annotation)[1])
    if not is_dataclass(annotation):
        return None
    return _without_bounds(annotations_of(cast("type", annotation)).get(str(key)))


def _without_bounds(annotation: Any) -> Any:
    is_bounded = typing.get_origin(annotation) is Annotated
    return typing.get_args(annotation)[0] if is_bounded else annotation


def _is_table(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Mapping


def _annotation(keys: Sequence[str]) -> Any:
    annotation: Any = _SECTIONS.get(keys[0]) if keys else None
    for key in keys[1:]:
        annotation = inner_annotation(annotation, key)
    return annotation


def _is_setting(keys: Sequence[str]) -> bool:
    section = _annotation(keys[:-1])
    return is_dataclass(section) and keys[-1] in annotations_of(cast("type", section))


def _may_be_left_out(keys: Sequence[str]) -> bool:
    """Whether it is an optional setting, or an entry of a table whose values are not text."""
    table = _annotation(keys[:-1])
    if _is_table(table):
        return inner_annotation(table, keys[-1]) is not str
    return table is Any or (_is_setting(keys) and _default(table, keys[-1]) in _EMPTY)


def _default(section: Any, key: str) -> Any:
    """MISSING if the setting has no default."""
    (field,) = (field for field in fields(section) if field.name == key)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _takes(annotation: Any, *kinds: type) -> bool:
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _takes(options[0], *kinds)
    if origin in (typing.Union, types.UnionType):
        return any(_takes(option, *kinds) for option in options)
    return annotation in kinds or origin in kinds


_Name = tuple[str, ...]


@cache
def other_names() -> Mapping[str, Mapping[str, str]]:
    """The counterparts in umbra of each full name, by trainer. A user may write the end of a name,
    or put it into one of umbra's sections: `train.beta`, `optim.lr`."""
    path = Path(__file__).with_name("other_trainers.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def other_trainers_hint(location: Sequence[str], value: Any, kind: type = TrainerConfig) -> str:
    """The counterpart in umbra of an unknown setting, or "". A table as `value` is a section there,
    such as verl's `actor_rollout_ref`: its settings count. A name alone that umbra has, too, does
    not mean another trainer's."""
    own = _settings(kind)
    hints: dict[str, None] = {}
    for name in _names(tuple(part.lstrip("+").replace("-", "_") for part in location), value):
        ends = [end for end in (name, name[1:]) if len(end) > 1 or own.keys().isdisjoint(end)]
        hints[next(filter(None, (_hint(end, kind) for end in ends)), "")] = None
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


def _hint(name: _Name, kind: type) -> str:
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
        f"{'.'.join(name)!r} of {', '.join(whose)}: {_worded(answer, kind)}"
        for answer, whose in trainers.items()
        if not (answer.startswith(_NEAREST) and answer.removeprefix(_NEAREST) in trainers)
    )


def _match(name: _Name, full: _Name, answer: str) -> _Match | None:
    """The name is the end of the full one, or something below it."""
    for num_shared in range(min(len(name), len(full)), 0, -1):
        # A single part, such as "model", shows no section if it is only the end of the full name.
        is_enough = num_shared > 1 or num_shared in (len(name), len(full))
        if is_enough and full[-num_shared:] == name[:num_shared]:
            return _Match(num_shared, num_shared - len(full), answer)
    return None


def _worded(answer: str, kind: type) -> str:
    if not answer:
        return _ABSENT
    names = answer.removeprefix(_NEAREST).split(", ")
    settings = " and ".join(map(repr, names))
    if not all(_is_used(name.split("."), kind) for name in names):
        return f"only {_OTHER[kind]} has a use for {settings}: leave it out"
    is_nearest = answer.startswith(_NEAREST)
    return f"not in umbra; nearest is {settings}" if is_nearest else f"use {settings}"
