"""Reads a TOML config with command-line overrides, and words what is wrong with it."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

from pydantic import BaseModel, ValidationError

from umbra.runtime.errors import ConfigError
from umbra.trainer.config import ServeConfig, TrainerConfig

_WORDS: Final = {
    "model_type": "should be a section",
    "dict_type": "should be a table",
    "path_type": "should be a path, as text",
    "tuple_type": "should be a list",
}
"""For errors that pydantic words for who wrote the Python types."""
_SURE_RATIO: Final = 0.8
"""How alike a key must be to one of another section; lower, and any key looks like some other."""
_Config = TypeVar("_Config", TrainerConfig, ServeConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """The config of a training run; see `read_config`."""
    return read_config(TrainerConfig, path, overrides)


def read_config(kind: type[_Config], path: str | Path, overrides: Sequence[str] = ()) -> _Config:
    """Reads `path` and puts `overrides` ("section.key=value", values as in TOML) over it.

    Raises:
        ConfigError: no such file, not TOML, a malformed override, or settings that are wrong:
            one line for each, with its key, what is allowed, and a close match.
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


def parse_config(values: Mapping[str, Any], source: str = "config") -> TrainerConfig:
    """Checks settings that are already a map of sections; raises ConfigError as `load_config`."""
    return check_config(TrainerConfig, values, source)


def check_config(
    kind: type[_Config], values: Mapping[str, Any], source: str, overrides: Sequence[str] = ()
) -> _Config:
    """The same for either kind of config, with `overrides` over it."""
    values = dict(values)
    for override in overrides:
        _apply_override(values, override)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [_describe(problem) for problem in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "; ".join(problems)) from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    table = values
    for key in keys[:-1]:
        inner: Any = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {key} is a value, not a section")
        table = cast("dict[str, Any]", inner)
    table[keys[-1]] = _parse_value(text.strip(), _annotation(keys))


def _parse_value(text: str, annotation: Any) -> Any:
    """A TOML value, or the bare text where it is none or text is what the key takes."""
    is_quoted = text[:1] in {'"', "'"}
    if not is_quoted and _takes_text(annotation):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _takes_text(annotation: Any) -> bool:
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _takes_text(options[0])
    if origin in (typing.Union, types.UnionType):
        return any(_takes_text(option) for option in options)
    return annotation is str or annotation is Path


def _annotation(keys: Sequence[str]) -> Any:
    model: Any = TrainerConfig
    for key in keys:
        model = _inner(model, key)
    return model


def _inner(annotation: Any, key: int | str) -> Any:
    """What a section has under `key`, or a table of sections; None where nothing is known."""
    if typing.get_origin(annotation) is dict:
        return typing.get_args(annotation)[1]
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return None
    field = annotation.model_fields.get(str(key))
    return field.annotation if field else None


def _describe(problem: Any) -> str:
    """One pydantic error as `key: what is wrong, what is allowed`."""
    location: tuple[int | str, ...] = problem["loc"]
    key = ".".join(str(part) for part in location)
    match problem["type"]:
        case "extra_forbidden":
            return f"{key} is unknown{_close_match(location)}"
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


def _close_match(location: tuple[int | str, ...]) -> str:
    model: Any = TrainerConfig
    for part in location[:-1]:
        model = _inner(model, part)
    key, known = str(location[-1]), list(model.model_fields)
    # A further pool has settings of its own, whatever other sections call theirs.
    elsewhere = _settings() if len(location) <= 2 else {}
    found = elsewhere.get(key, [])
    if len(found) != 1:
        close = difflib.get_close_matches(key, known, n=1)
        similar = difflib.get_close_matches(key, list(elsewhere), n=1, cutoff=_SURE_RATIO)
        found = close or found or [name for near in similar for name in elsewhere[near]]
    hint = f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
    return f"{hint} (allowed: {', '.join(sorted(known))})"


def _settings() -> dict[str, list[str]]:
    """The names in full of all sections' settings, by that within the section."""
    found: dict[str, list[str]] = {}
    for name, section in TrainerConfig.model_fields.items():
        for key in getattr(section.annotation, "model_fields", {}):
            found.setdefault(key, []).append(f"{name}.{key}")
    return found


def _close_literal(problem: Any) -> str:
    given, expected = str(problem["input"]), str(problem["ctx"]["expected"])
    allowed = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    close = difflib.get_close_matches(given, allowed, n=1)
    return f", got {given!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
