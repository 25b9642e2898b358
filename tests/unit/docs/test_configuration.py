"""docs/configuration.md says of every setting and every combination what trainer/config says."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from umbra.runtime.settings import annotations_of
from umbra.trainer.config.setting_rules import RULES
from umbra.trainer.config.sft_config import SftConfig, SftSection
from umbra.trainer.config.trainer_config import TrainerConfig

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"

_HEAD = """# Configuration

`torchrun --nproc-per-node N -m umbra.trainer CONFIG.toml [section.key=value ...]` reads a TOML file
and the changes to it on the command line.

- Paths are relative to the current folder.
- Required settings have no default. An unknown key or a wrong value is an error that names it.
- A combination of settings that cannot work is refused; one that works and is probably a mistake
  is a warning of `umbra doctor` and of the start. Both print what "auto" stands for on the machine.
- On the command line an empty value (`data.eval=`) unsets a setting whose default is `unset` or
  empty, or removes an entry of a table (`pools.judge=`). In `env`, an empty value means an empty
  string. Other settings cannot be unset.
"""


_UNUSED = re.compile(r"(?P<name>\S+) has no effect: (?P<remedy>.*), or leave (?P=name) out")
_SFT_SECTIONS = ", ".join(f"[{name}]" for name in annotations_of(SftConfig))


def document() -> str:
    """The whole of it, from the docstrings and defaults of the sections."""
    parts = [_HEAD]
    described: dict[str, tuple[str, str]] = {}  # name, default and text -> section, allowed
    for name, section in _sections():
        summary = (inspect.getdoc(section) or "").split("\n\n")[0].partition(": ")[2]
        summary = " ".join(summary.split())
        parts.append(f"\n## [{name}]\n\n{summary[0].upper()}{summary[1:]}\n")
        parts.append("\n| key | allowed | default | what it is |\n|---|---|---|---|\n")
        texts: dict[str, str] = {}
        for kind in section.__mro__:
            texts |= _attributes(inspect.cleandoc(kind.__doc__ or ""))
        schemas = TypeAdapter(section).json_schema()["properties"]
        repeated: dict[str, list[str]] = {}
        for field in fields(section):
            if is_dataclass(field.default):  # a section of its own
                continue
            allowed, text = _allowed(schemas[field.name]), texts[field.name]
            row = f"{_default(field)} | {text} |\n"
            other, others_allowed = described.setdefault(f"{field.name} | {row}", (name, allowed))
            if other == name:
                parts.append(f"| `{field.name}` | {allowed} | {row}")
            else:
                bounds = "" if allowed == others_allowed else f" ({allowed})"
                repeated.setdefault(other, []).append(f"`{field.name}`{bounds}")
        for other, names in repeated.items():
            parts.append(f"\n{', '.join(names)}: as in [{other}](#{other}).\n")
    parts.append("\n## Combinations\n\nConditions are Python over the sections of the config.\n")
    parts.append("\n| if | then | because |\n|---|---|---|\n")
    unused: dict[tuple[str, str], list[str]] = {}  # condition and remedy -> settings
    for rule in RULES:
        if found := _UNUSED.fullmatch(rule.text):
            condition = rule.condition.partition(" and ")[2]
            unused.setdefault((condition, found["remedy"]), []).append(f"`{found['name']}`")
            continue
        verdict = "refused" if rule.severity == "error" else "warning"
        parts.append(f"| `{rule.condition}` | {verdict} | {rule.text} |\n")
    parts.append("\nA setting without effect is a warning, unless it has its default:\n")
    parts.append("\n| without effect | if | remedy |\n|---|---|---|\n")
    for (condition, remedy), names in unused.items():
        parts.append(f"| {', '.join(names)} | `{condition}` | {remedy} |\n")
    parts.append(
        f"\n[SFT](sft.md) has the sections {_SFT_SECTIONS}, and refuses settings of them that only "
        "RL uses.\n"
    )
    return "".join(parts)


def _sections() -> Iterator[tuple[str, Any]]:
    """Those of the config, each with those in it."""
    for name, section in (annotations_of(TrainerConfig) | {"sft": SftSection}).items():
        if typing.get_origin(section) is Mapping:
            name, section = f"{name}.NAME", typing.get_args(section)[1]
        yield name, section
        for field in fields(section):
            if is_dataclass(field.default):
                yield f"{name}.{field.name}", annotations_of(section)[field.name]


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return f"`{_toml(field.default_factory())}`"
    return "required" if field.default is MISSING else f"`{_toml(field.default)}`"


def _allowed(schema: dict[str, Any]) -> str:
    """What the JSON schema of a setting lets through, in words."""
    if choices := [c for c in schema.get("anyOf", []) if c.get("type") != "null"]:  # null is unset
        return ", ".join(map(_allowed, choices))
    if "const" in schema:
        return f"`{_toml(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_toml(value)}`" for value in schema["enum"])
    match schema["type"]:
        case "boolean":
            return "`true`, `false`"
        case "integer" | "number":
            return " ".join((schema["type"], *_bounds(schema)))
        case "array" if "prefixItems" in schema:
            first, *others = map(_allowed, schema["prefixItems"])
            assert set(others) == {first}
            return f"list of {1 + len(others)}: {first}"
        case "array":
            return f"list of: {_allowed(schema['items'])}"
        case "object":
            return "table"
        case _:
            return "path" if schema.get("format") == "path" else "text"


def _bounds(schema: dict[str, Any]) -> list[str]:
    words = {
        "minimum": "from {:g}",
        "exclusiveMinimum": "above {:g}",
        "maximum": "to {:g}",
        "exclusiveMaximum": "below {:g}",
    }
    return [text.format(schema[name]) for name, text in words.items() if name in schema]


def _toml(value: object) -> str:
    return "unset" if value is None else json.dumps(value, default=str)


def _attributes(docstring: str) -> dict[str, str]:
    """name -> text of the docstring's "Attributes:"; "a, b: text" stands for both."""
    found: dict[str, str] = {}
    block = docstring.partition("Attributes:\n")[2]
    for entry in re.split(r"\n(?=    \S)", "\n" + block):
        names, _, text = entry.strip().partition(": ")
        for name in names.split(", "):
            plain = " ".join(text.split()).replace("|", "\\|")
            found[name] = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", plain)
    return found


def test_the_document_is_what_the_code_says() -> None:
    assert DOCUMENT.read_text() == document(), "run: python tests/unit/docs/test_configuration.py"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
