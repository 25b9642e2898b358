"""Reads a TOML config with command-line overrides, and words its errors."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import annotations_of
from umbra.trainer.config.config_overrides import (
    Override,
    inner_annotation,
    overrides_behind,
    overrides_of,
)
from umbra.trainer.config.other_trainers import other_trainers_hint
from umbra.trainer.config.setting_rules import refusals
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig

_WORDS: Final = {
    "dataclass_type": "should be a section",
    "dict_type": "should be a table",
    "string_type": "should be text",
    "tuple_type": "should be a list",
}
"""Replace messages of pydantic that speak of Python types."""
_SURE_RATIO: Final = 0.8
"""Similarity from which a key of another section is suggested. Lower values suggest unrelated
keys."""
_Config = TypeVar("_Config", TrainerConfig, ServeConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """The config of a training run; see `read_config`."""
    return read_config(TrainerConfig, path, overrides)


def read_config(kind: type[_Config], path: str | Path, overrides: Sequence[str] = ()) -> _Config:
    """Reads `path`; `overrides` ("section.key=value", values as in TOML) replace its values.

    Raises:
        ConfigError: there is no such file, it is not TOML, an override is malformed, or settings
            are wrong. The message names each wrong key, what is allowed, and a close match.
    """
    place = Path(path)
    try:
        values = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "; the config file comes before settings" if "=" in place.name else ""
        raise ConfigError(
            f"config file {place.absolute()} cannot be read: {error.strerror}{hint}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {place} is not valid TOML: {error}") from error
    return check_config(kind, values, str(place), overrides)


def check_config(
    kind: type[_Config], values: Mapping[str, Any], source: str, overrides: Sequence[str] = ()
) -> _Config:
    """Checks the values of a config, with `overrides` in their place."""
    parsed = [Override.parse(given) for given in overrides]
    changed = copy.deepcopy(dict(values))
    for override in parsed:
        override.apply_to(changed)
    try:
        # As JSON, lists become tuples and text becomes paths; all else keeps its type. A date or
        # time becomes text, which no number or truth value takes.
        config = TypeAdapter(kind).validate_json(json.dumps(changed, default=str))
    except ValidationError as error:
        problems = [
            _sourced(_describe(problem), source, overrides_behind(problem, parsed, values))
            for problem in error.errors(include_url=False)
        ]
        raise ConfigError("; ".join(problems)) from None
    if isinstance(config, TrainerConfig) and (rules := refusals(config)):
        problems = [
            _sourced(rule.message(config), source, overrides_of(rule.settings, parsed))
            for rule in rules
        ]
        raise ConfigError("; ".join(problems))
    return config


def _sourced(text: str, source: str, behind: Sequence[Override]) -> str:
    """A problem and its source: the file, or settings on the command line."""
    if not behind:
        return f"{source}: {text}"
    given = " ".join(override.given for override in behind)
    return f"{given} (command line): {text.removeprefix(f'{behind[0].key}: ')}"


def _describe(problem: Any) -> str:
    """One pydantic error as `key: what is wrong, what is allowed`."""
    location: tuple[int | str, ...] = problem["loc"]
    key = ".".join(str(part) for part in location)
    match problem["type"]:
        case "unexpected_keyword_argument":
            return f"{key} is unknown{_unknown_hint(location, problem['input'])}"
        case "missing":
            return f"{key if len(location) > 1 else f'section [{key}]'} is missing"
        case "literal_error":
            return f"{key}: {_lower_first(problem['msg'])}{_close_literal(problem)}"
        case "value_error":
            return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
        case _:
            words = _WORDS.get(problem["type"], _lower_first(problem["msg"]))
            return f"{key}: {words}{_shown(problem['input'])}"


def _shown(given: object) -> str:
    if isinstance(given, str | int | float | bool):
        return f", got {given!r}"
    if isinstance(given, dict):
        return ", got a table"
    return ", got a list" if isinstance(given, list) else ""


def _unknown_hint(location: tuple[int | str, ...], given: Any) -> str:
    """The setting that was probably meant, and those that the section has."""
    section: Any = TrainerConfig
    for part in location[:-1]:
        section = inner_annotation(section, part)
    key, known = str(location[-1]), list(annotations_of(section))
    allowed = f" (allowed: {', '.join(sorted(known))})"
    # An auxiliary pool has settings of its own, whatever other sections and trainers call theirs.
    elsewhere = _settings() if len(location) <= 2 else {}
    found = elsewhere.get(key, [])
    names = [str(part) for part in location]
    if elsewhere and (hint := other_trainers_hint(names, given, is_known=bool(found))):
        return f"; {hint}{allowed}"
    if len(found) != 1:
        close = difflib.get_close_matches(key, known, n=1)
        similar = difflib.get_close_matches(key, list(elsewhere), n=1, cutoff=_SURE_RATIO)
        found = close or found or [name for near in similar for name in elsewhere[near]]
    hint = f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
    return hint + allowed


def _settings() -> dict[str, list[str]]:
    """The full names of all settings, by their name within the section."""
    found: dict[str, list[str]] = {}
    for name, section in annotations_of(TrainerConfig).items():
        for field in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
            found.setdefault(field.name, []).append(f"{name}.{field.name}")
    return found


def _close_literal(problem: Any) -> str:
    given, expected = str(problem["input"]), str(problem["ctx"]["expected"])
    allowed = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    close = difflib.get_close_matches(given, allowed, n=1)
    return f", got {given!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
