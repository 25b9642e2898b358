"""Samples of a run, from its ledger and its file of prompts: as facts, as text, and laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, cast

from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.rollout.agents.sample_text import LoopHistory, SampleText
from umbra.runtime.rollout.ledger.ledger_events import GIVEN
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder, managers_of
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.sample_accounts import SampleRow, SampleState
from umbra.runtime.rollout.ledger.sample_contents import SampleContent
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.terminal_text import escape_unprintable
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path

Row = dict[str, Any]
Order = Literal["newest", "best", "worst"]

PROMPTS: Final = "prompts.msgpack"
_REMEDY: Final = "give the directory of the run's model (umbra samples --model DIR)"
NO_LONGER_KEPT: Final = "no longer kept, see rollout.ledger_gb"
_MARGIN: Final = "  | "
"""Begins each line of a sample's text, so that no text can look like a line of this command."""


def open_ledger(run_dir: Path) -> LedgerIndex:
    managers = managers_of(run_dir)  # a run has one
    if not managers:
        raise ConfigError(
            f"{run_dir} has no ledger (no files {run_dir}/ledger/*/*.log): give the folder that "
            "the job's config calls run.dir"
        )
    return LedgerIndex(ledger_folder(run_dir, managers[0]))


def find_sample(index: LedgerIndex, sample_id: str) -> SampleRow:
    """Raises ConfigError, with a hint, if there is none."""
    found = index.find(sample_id)
    if found is None:
        similar = index.similar(sample_id)
        hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
        raise ConfigError(f"the ledger has no sample {sample_id!r}{hint}")
    return found


class SampleIndex:
    """The samples of one run directory, while its ledger grows. Blocking: one thread at a time may
    use it. A ledger that was begun again, because the run was started again, is read from scratch.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder_inode = 0  # a run that overwrites another one has a new folder
        self._ledger: LedgerIndex | None = None
        self._texts: SampleTexts | None = None

    def open(self) -> None:
        """Reads the whole ledger, and opens the tokenizer and the prompts."""
        self.refresh()
        if self._ledger is not None:
            self._texts = SampleTexts(self._run_dir)

    def refresh(self) -> None:
        has_ledger = bool(managers_of(self._run_dir))
        inode = (self._run_dir / "ledger").stat().st_ino if has_ledger else 0
        if inode != self._folder_inode:
            self._ledger, self._texts, self._folder_inode = None, None, inode
        if self._ledger is not None:
            self._ledger.refresh()
        elif has_ledger:
            self._ledger = open_ledger(self._run_dir)

    def choose(self, order: Order, limit: int, step: int | None = None) -> tuple[list[Row], int]:
        """The facts of at most `limit` samples, and their total. `step` is from 1; None: all."""
        if self._ledger is None:
            return [], 0
        chosen, num_samples = choose_samples(self._ledger, order, limit, step)
        return [_facts(row) for row in chosen], num_samples

    def sample(self, sample_id: str) -> Row:
        """The facts and the text of one sample. Raises ConfigError if there is no such sample, or
        the run's tokenizer is unknown; raises DataError if the model has no tokenizer, or the file
        of prompts is damaged."""
        if self._ledger is None:
            raise ConfigError(f"the ledger has no sample {sample_id!r}")
        row = find_sample(self._ledger, sample_id)
        if self._texts is None:
            self._texts = SampleTexts(self._run_dir)
        return self._texts.read(self._ledger, [row])[0] | _facts(row)


def choose_samples(
    index: LedgerIndex, order: Order, limit: int, step: int | None
) -> tuple[list[SampleRow], int]:
    """At most `limit` samples, and their total. `step` is from 1; None: all."""
    step = None if step is None else step - 1
    if order == "newest":
        return index.with_tokens(limit, step)
    return index.extremes(limit, best=order == "best", step=step)


def _facts(row: SampleRow) -> Row:
    versions = {version for _, version in row.segments} - {GIVEN}
    return row.facts() | {"state": row.state.words, "versions": sorted(versions)}


class SampleTexts:
    """The run's tokenizer, or the one in the directory `model`, and where each prompt is in their
    file. Raises DataError if there is no tokenizer, or the file of prompts is missing or damaged.
    """

    def __init__(self, run_dir: Path, model: str | None = None) -> None:
        path = tokenizer_path(run_dir)
        if model is None and not path.exists():
            raise DataError(f"{path} does not exist, so the tokenizer is unknown: {_REMEDY}")
        self._tokenizer = ModelTokenizer.open(model or path)
        self._prompts = PromptSet.open(run_dir / PROMPTS)

    def read(self, ledger: LedgerIndex, rows: Sequence[SampleRow]) -> list[Row]:
        """Facts and texts of samples, as plain data."""
        contents = ledger.contents(rows)
        return [row.facts() | self._decode(row, contents.get(row.uid)) for row in rows]

    def _decode(self, row: SampleRow, content: SampleContent | None) -> Row:
        """Prompt, turns, and the agent loop's records. `content` is None if the ledger no longer
        has it."""
        prompt = self._prompts.find(row.group.prompt_id)
        is_kept = content is not None
        content = content or SampleContent()
        tokens = content.prompt
        if tokens is None and prompt is not None:
            tokens = prompt.tokens
        history = LoopHistory.of_records(content.recorded)
        text = SampleText.decode(
            self._tokenizer.decode_all,
            [] if tokens is None else tokens.tolist(),
            content.tokens.tolist(),
            row.runs() if is_kept else [],
            [turn for turn in history.turns if turn.stop <= len(content.tokens)],
        )
        return {
            "prompt": None if tokens is None else text.prompt,
            "is_kept": is_kept,
            "is_prompt_of_loop": content.prompt is not None,
            "turns": [asdict(turn) for turn in text.turns],
            "recorded": _plain(history.once),
        }


def text_of(sample: Mapping[str, Any]) -> str:
    """One sample of `SampleTexts.read`, escaped for a terminal."""
    state = [SampleState(sample["state"]).words]
    if sample["step"] is not None:
        state.append(f"step {sample['step']}")
    state += [text for text in (sample["finish_reason"], sample["drop_reason"]) if text]
    counts = [f"reward {reward_text(sample)}", _count(sample["num_tokens"], "token")]
    if sample["interruptions"]:
        counts.append(_count(sample["interruptions"], "interruption"))
    if sample["resets"]:
        counts.append(_count(sample["resets"], "reset"))
    if sample["rolled_back_tokens"]:
        counts.append(f"{_count(sample['rolled_back_tokens'], 'token')} rolled back")
    lines = [
        _one_line(f"{sample['sample_id']}: {', '.join(state)}"),
        f"  {', '.join(counts)}",
        "prompt of the agent loop" if sample["is_prompt_of_loop"] else "prompt",
    ]
    lines += _quoted(sample["prompt"], f"not in {PROMPTS}")
    for turn in sample["turns"]:
        num_tokens = _count(turn["stop"] - turn["start"], "token")
        versions = ", ".join(map(str, turn["versions"]))
        source = f"policy, version {versions}" if versions else "given"
        end = _one_line(f", {turn['finish_reason']}" * bool(turn["finish_reason"]))
        lines += [f"{source}, {num_tokens}{end}", *_quoted(turn["text"])]
    if not sample["turns"]:
        lines.append("no tokens" if sample["is_kept"] else NO_LONGER_KEPT)
    for key, value in sample["recorded"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [_one_line(f"recorded {key}"), *_quoted(text)]
    return "\n".join(lines)


def reward_text(sample: Mapping[str, Any]) -> str:
    """The reward with its parts; a part that does not apply is left out."""
    if sample["reward"] is None:
        return "none"
    parts = [
        f"{name} {part:g}" for name, part in sample["reward_parts"].items() if part is not None
    ]
    return f"{sample['reward']:g}" + f" ({', '.join(parts)})" * bool(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _plain(value: object) -> Any:
    """A recorded value as JSON can hold it; bytes as Python writes them."""
    match value:
        case dict():
            members = cast("dict[object, object]", value)
            return {str(key): _plain(member) for key, member in members.items()}
        case list():
            return [_plain(member) for member in cast("list[object]", value)]
        case None | str() | bool() | int() | float():
            return value
        case _:
            return repr(value)


def _quoted(text: str | None, otherwise: str = "") -> list[str]:
    if text is None:
        return [f"  {otherwise}"]
    return [_MARGIN + escape_unprintable(line, keep="\t") for line in text.split("\n")]


def _one_line(text: str) -> str:
    return escape_unprintable(text, keep="")
