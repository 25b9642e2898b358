"""The parts of groups of settings: bounds, which are written once, and the form that travels.

A group of settings is a frozen dataclass beside the code that uses it. Its annotations hold the
bounds. pydantic checks them when a config file or command line is read, and `Settings` checks them
whenever Python code creates a group.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class RolloutSettings(Settings):
        group_size: Positive = 8

Nothing here imports pydantic, which calls the methods in `__get_pydantic_…__`.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from umbra.runtime.errors import ConfigError, SettingError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of a number. annotated_types would take every actor 20 ms to import. `zero` is
    what 0 stands for, where numbers count from 1."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    zero: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        limits = {"ge": self.ge, "gt": self.gt, "le": self.le, "lt": self.lt}
        schema = handler(source) | {key: at for key, at in limits.items() if at is not None}
        if not self.zero:
            return schema
        from pydantic_core.core_schema import custom_error_schema

        message = f"use {self.allowed_instead_of(-1)}"
        return custom_error_schema(schema, "bounds", custom_error_message=message)

    def allowed_instead_of(self, value: float) -> str:
        """Empty if the value is allowed."""
        if self.ge is not None and not value >= self.ge:
            return f"1 or more, or 0 for {self.zero}" if self.zero else f"{self.ge} or more"
        if self.gt is not None and not value > self.gt:
            return f"more than {self.gt}"
        if self.le is not None and not value <= self.le:
            return f"{self.le} or less"
        if self.lt is not None and not value < self.lt:
            return f"less than {self.lt}"
        return ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A bound that is a function: it raises ValueError for a value that is not allowed."""

    check: Callable[[Any], None]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self._pass, handler(source))

    def _pass(self, value: T) -> T:
        self.check(value)
        return value


@dataclass(frozen=True, slots=True)
class _NumberOrAuto:
    """The bound of a number that may be "auto"; an error names both at once."""

    least: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import custom_error_schema, union_schema

        either = union_schema(
            [handler(Annotated[int, Bounds(ge=self.least)]), handler(Literal["auto"])]
        )
        return custom_error_schema(either, "number_or_auto", custom_error_message=f"use {self}")

    def __str__(self) -> str:
        return f"{self.least} or more, or 'auto'"


@dataclass(frozen=True, slots=True)
class _OneOrSeveral:
    """The bound of a setting that has one path, or a list of them that becomes a tuple."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_wrap_validator_function

        return no_info_wrap_validator_function(self._validate, handler(FilePath))

    def __get_pydantic_json_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        one = handler(source)
        return {"anyOf": [one, {"type": "array", "items": one}]}

    def _validate(self, value: object, validate_one: Callable[[object], Path]) -> object:
        if not isinstance(value, list | tuple):
            return validate_one(value)
        if not value:
            raise ValueError("the list is empty: name at least one file")
        return tuple(validate_one(path) for path in cast("Sequence[object]", value))


def check_function_name(spec: str) -> None:
    module, colon, function = spec.partition(":")
    parts = [*module.split("."), *function.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ValueError(f"a function is written as 'module:function', got {spec!r}")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, where the host may be an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isdecimal() and int(port) <= 65535
    if not host or not is_port or (":" in host and not is_bracketed):
        raise ValueError(f"an address is written as HOST:PORT, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_address(address: str) -> None:
    if address:
        split_address(address)


def _check_no_nul(value: object) -> None:
    """The system takes no NUL in a path or in an environment variable."""
    if "\0" in str(value):
        raise ValueError(f"{str(value)!r} holds a NUL character: remove it")


def _check_no_nul_in_items(items: Mapping[str, str]) -> None:
    for name, value in items.items():
        _check_no_nul(name)
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL character: remove it")


Positive = Annotated[int, Bounds(ge=1)]
Count = Annotated[int, Bounds(ge=0)]
PositiveOrAuto = Annotated[int | Literal["auto"], _NumberOrAuto(1)]
CountOrAuto = Annotated[int | Literal["auto"], _NumberOrAuto(0)]
Seconds = Annotated[float, Bounds(gt=0)]
Share = Annotated[float, Bounds(ge=0, lt=1)]
FilePath = Annotated[Path, Checked(_check_no_nul)]
FilePaths = Annotated[Path | tuple[Path, ...], _OneOrSeveral()]
PathText = Annotated[str, Checked(_check_no_nul)]
Variables = Annotated[Mapping[str, str], Checked(_check_no_nul_in_items)]
Address = Annotated[str, Checked(_check_address)]
"""HOST:PORT, or "" for none."""
FunctionName = Annotated[str, Checked(check_function_name)]
Dtype = Literal["float32", "bfloat16", "float64"]
DtypeOrAuto = Literal["auto", "float32", "bfloat16", "float64"]


def files_of(paths: Path | tuple[Path, ...] | None) -> tuple[Path, ...]:
    if paths is None:
        return ()
    return paths if isinstance(paths, tuple) else (paths,)


@functools.cache
def annotations_of(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


class Settings:
    """Base of all groups of settings, which are dataclasses."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises SettingError for the first setting that is out of bounds; types are not checked.
        Groups override it to check settings against each other, and call it first."""
        for name, hint in annotations_of(type(self)).items():
            _check(name, getattr(self, name), hint)


def to_wire(value: Any) -> Any:
    """A dataclass, or a value of its fields, as plain values that a message can carry."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_wire(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_wire(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [to_wire(item) for item in cast("Sequence[Any]", value)]
    return str(value) if isinstance(value, Path) else value


MASK: Final = "***"
CREDENTIAL: Final = re.compile(r"(^|[_-])(token|key|secret|password)$", re.IGNORECASE)
"""Keys of mappings such as `engine_args` whose texts are masked."""


def shown_settings(value: Any) -> Any:
    """Like `to_wire`, for people and files: values of variables and of credentials are masked."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = annotations_of(cast("Any", value).__class__)
        return {name: _shown(getattr(value, name), hint) for name, hint in hints.items()}
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {
            key: MASK if isinstance(item, str) and CREDENTIAL.search(key) else shown_settings(item)
            for key, item in items
        }
    return to_wire(value)


def _shown(value: Any, hint: Any) -> Any:
    return dict.fromkeys(value, MASK) if hint == Variables else shown_settings(value)


def chosen_settings(sections: Any, prefix: str = "") -> dict[str, Any]:
    """The settings that differ from their defaults, as `shown_settings`, by `section.key`."""
    hints = annotations_of(sections.__class__)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(sections):
        key, value = f"{prefix}{field.name}", getattr(sections, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        parts = {key: value}
        if isinstance(value, Mapping):
            parts = {f"{key}.{name}": v for name, v in cast("Mapping[str, Any]", value).items()}
        if parts and all(map(dataclasses.is_dataclass, parts.values())):
            for name, part in parts.items():
                chosen |= chosen_settings(part, f"{name}.")
        elif value != default:
            chosen[key] = _shown(value, hints[field.name])
    return chosen


def from_wire(kind: type[T], data: Mapping[str, Any]) -> T:
    """The inverse of `to_wire`. Raises ConfigError if a field is unknown or missing."""
    hints = annotations_of(kind)
    fields = {name: _decode(value, hints.get(name)) for name, value in data.items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from None


def _decode(value: Any, hint: Any) -> Any:
    if value is None:
        return None
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Annotated:
            return _decode(value, arguments[0])
        case typing.Union | types.UnionType:  # of one type, a tuple of it, and None
            is_tuple = [typing.get_origin(kind) is builtins.tuple for kind in arguments]
            idx = is_tuple.index(True) if isinstance(value, list) and any(is_tuple) else 0
            return _decode(value, arguments[idx])
        case builtins.tuple:
            return tuple(_decode(item, arguments[0]) for item in value)
        case collections.abc.Mapping:
            return {key: _decode(item, arguments[1]) for key, item in value.items()}
        case _:
            pass
    if dataclasses.is_dataclass(hint):
        return from_wire(cast("type[Any]", hint), value)
    return Path(value) if hint is Path else value


def _check(name: str, value: Any, hint: Any) -> None:
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal if value not in arguments:
            allowed = " or ".join(map(repr, arguments))
            raise SettingError(f"{name} is {value!r}: use {allowed}")
        case typing.Union | types.UnionType if value is not None:
            _check(name, value, arguments[0])
        case typing.Annotated:
            for bound in arguments[1:]:
                _check_bound(name, value, bound)
        case _:
            pass


def _check_bound(name: str, value: Any, bound: object) -> None:
    match bound:
        case Bounds():
            allowed = bound.allowed_instead_of(value)
        case _NumberOrAuto(least) if value != "auto" and not value >= least:
            allowed = str(bound)
        case Checked() | _OneOrSeveral():
            check = bound.check if isinstance(bound, Checked) else _check_no_nul
            try:
                return check(value)
            except ValueError as error:
                raise SettingError(f"{name}: {error}") from None
        case _:
            return
    if allowed:
        raise SettingError(f"{name} is {value!r}: use {allowed}")
