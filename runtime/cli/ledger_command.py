"""`umbra ledger` and `umbra samples`: where a job's samples are, and their text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

from umbra.runtime.dash.sample_texts import (
    NO_LONGER_KEPT,
    Order,
    SampleTexts,
    choose_samples,
    find_sample,
    open_ledger,
    reward_text,
    text_of,
)
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.sample_accounts import SampleRow, SampleState
from umbra.runtime.terminal_text import escape_unprintable

# More would scroll the list's head out of the screen; fewer would make --newest a habit.
_DEFAULT_NEWEST: Final = 20
_TOTALS: Final = {
    "generated_tokens": "tokens generated",
    "given_tokens": "tokens given by agent loops",
    "rolled_back_tokens": "tokens cut off by restored checkpoints",
    "reset_tokens": "tokens of agent loops that started over",
    "interruptions": "interruptions",
    "resets": "agent loops that started over",
    "restores": "times that the job resumed from a checkpoint",
}

_DEFAULT_LIMIT: Final = 3
"""Samples shown by default. More would scroll out of the screen; fewer do not show what varies."""


def run(arguments: argparse.Namespace) -> int:
    """Prints text, or with `--json` one object. Works while the job runs, too."""
    lists_samples = _lists_samples(arguments)
    index = open_ledger(Path(arguments.run_dir))
    if lists_samples:
        facts, as_text = _samples(index, arguments), _samples_text
    elif arguments.sample is None:
        facts, as_text = _summary(index), _summary_text
    else:
        facts, as_text = _sample(index, arguments.sample), _sample_text
    print(json.dumps(facts) if arguments.json else as_text(_escaped(facts)))
    return 0


def _lists_samples(arguments: argparse.Namespace) -> bool:
    narrowing = (arguments.state, arguments.step, arguments.newest)
    lists_samples = arguments.samples or any(value is not None for value in narrowing)
    if lists_samples and arguments.sample is not None:
        raise ConfigError(
            "--sample shows one sample: leave it out to list samples (--samples, --state, "
            "--step, --newest)"
        )
    if arguments.state is not None and arguments.state not in list(SampleState):
        raise ConfigError(f"no state {arguments.state!r}: there are {', '.join(SampleState)}")
    return lists_samples


def _summary(index: LedgerIndex) -> dict[str, Any]:
    table = index.table
    return {
        "states": {str(state): table.counts[state] for state in SampleState},
        "drop_reasons": dict(table.drop_reasons.most_common()),
        "totals": asdict(table.totals),
        "steps_done": table.steps_done,
        "covered_step": table.covered_step,
        "evaluations": [evaluation._asdict() for evaluation in index.evaluations()],
        "position": index.end,
        "lives": [life._asdict() for life in index.lives()],
    }


def _samples(index: LedgerIndex, arguments: argparse.Namespace) -> dict[str, Any]:
    state = None if arguments.state is None else SampleState(arguments.state)
    step = None if arguments.step is None else arguments.step - 1
    samples, num_samples = index.newest(arguments.newest or _DEFAULT_NEWEST, state, step)
    return {"num_samples": num_samples, "samples": [row.facts() for row in samples]}


def _sample(index: LedgerIndex, sample_id: str) -> dict[str, Any]:
    row = find_sample(index, sample_id)
    return row.facts() | {
        "segments": [run._asdict() for run in row.runs()],
        "history": index.story(row),
        "digest": index.digest(row),
    }


def _summary_text(facts: Mapping[str, Any]) -> str:
    lines = ["samples"]
    lines += _columns([(state, f"{count:,}") for state, count in facts["states"].items()])
    if facts["drop_reasons"]:
        lines.append("dropped because")
        lines += _columns([(name, f"{count:,}") for name, count in facts["drop_reasons"].items()])
    lines.append("in all")
    lines += _columns([(text, f"{facts['totals'][name]:,}") for name, text in _TOTALS.items()])
    lines.append(
        f"optimizer steps done: {facts['steps_done']}, covered by a checkpoint: "
        f"{facts['covered_step']}"
    )
    if facts["evaluations"]:
        last = facts["evaluations"][-1]
        lines.append(
            f"evaluations: {len(facts['evaluations'])}, the last after step {last['step']}"
        )
    lives = facts["lives"]
    noun = "incarnation" if len(lives) == 1 else "incarnations"
    newest = f", the newest since {_time(lives[-1]['time_s'])}" if lives else ""
    lines.append(f"rollout manager: {len(lives)} {noun}{newest}, ledger up to {facts['position']}")
    return "\n".join(lines)


def _samples_text(facts: Mapping[str, Any]) -> str:
    samples, num_samples = facts["samples"], facts["num_samples"]
    if not samples:
        return "no such samples"
    cells = [
        (
            row["sample_id"],
            row["state"],
            _or_dash(row["step"], "d"),
            _or_dash(row["reward"], "g"),
            str(row["num_tokens"]),
            row["drop_detail"] or row["finish_reason"] or "-",
        )
        for row in samples
    ]
    lines = _columns([("sample", "state", "step", "reward", "tokens", "end"), *cells])
    if num_samples > len(samples):
        lines.append(f"the newest {len(samples):,} of {num_samples:,}: --newest N lists N")
    return "\n".join(lines)


def _escaped(facts: Any) -> Any:
    """Escapes ids and reasons, which are users' texts and may hold control characters."""
    match facts:
        case str():
            return escape_unprintable(facts, keep="")  # a cell is one line
        case dict():
            members = cast("dict[str, Any]", facts)
            return {_escaped(key): _escaped(value) for key, value in members.items()}
        case list():
            return [_escaped(value) for value in cast("list[Any]", facts)]
        case _:
            return facts


def _or_dash(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def _sample_text(facts: Mapping[str, Any]) -> str:
    state = [facts["state"]]
    if facts["step"] is not None:
        state.append(f"step {facts['step']}")
    state += [text for text in (facts["finish_reason"], facts["drop_reason"]) if text]
    lines = [
        f"{facts['sample_id']}: {', '.join(state)}",
        f"  prompt {facts['prompt_id']}, index {facts['place']} in the data, seed {facts['seed']}",
        f"  reward {reward_text(facts)}, {facts['num_tokens']} tokens, {facts['interruptions']} "
        f"interruptions, {facts['resets']} resets, {facts['rolled_back_tokens']} tokens rolled "
        "back",
        "segments",
    ]
    lines += _columns(
        [
            (
                f"{part['start']} to {part['stop']}",
                "given" if part["version"] < 0 else f"version {part['version']}",
            )
            for part in facts["segments"]
        ]
    ) or ["  none"]
    lines.append("history")
    lines += _columns(
        [(_time(row["time_s"]), row["event"], row["detail"]) for row in facts["history"]]
    ) or [f"  {NO_LONGER_KEPT}; digest of the tokens: {facts['digest']}"]
    return "\n".join(lines)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().isoformat(" ", "milliseconds")


def run_samples(arguments: argparse.Namespace) -> int:
    """Prints text, or with `--json` one object. Works while the job runs, too."""
    if arguments.ids and (arguments.step or arguments.best or arguments.worst):
        raise ConfigError("samples given by id need no --step, --best or --worst: leave them out")
    run_dir = Path(arguments.run_dir)
    index = open_ledger(run_dir)
    rows, choice = _choose(index, arguments)
    samples = SampleTexts(run_dir, arguments.model).read(index, rows) if rows else []
    if arguments.json:
        print(json.dumps({"samples": samples}))
        return 0
    print("\n\n".join([*map(text_of, samples), *filter(None, [choice])]))
    return 0


def _choose(index: LedgerIndex, arguments: argparse.Namespace) -> tuple[list[SampleRow], str]:
    """The rows of the wanted samples, and a line about the others."""
    if arguments.ids:
        return [find_sample(index, sample_id) for sample_id in arguments.ids], ""
    step: int | None = arguments.step
    limit, of = arguments.best or arguments.worst or _DEFAULT_LIMIT, "samples with a reward"
    order: Order = "best" if arguments.best else "worst"
    if not (arguments.best or arguments.worst):
        order, of = "newest", "samples with a completion; choose by id, --best N or --worst N"
    rows, num_samples = choose_samples(index, order, limit, step)
    if not rows:
        if step is not None and (steps := index.steps()):
            there_are = f"there are steps {steps[0] + 1} to {steps[1] + 1}"
            return [], f"no samples of step {step}: {there_are}"
        return [], "no such samples yet"
    of_step = "" if step is None else f" of step {step}"
    return rows, f"the {order} {len(rows):,}{of_step}, of {num_samples:,} {of}"
