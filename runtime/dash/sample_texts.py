"""Samples of a run as text: read from the ledger and the file of prompts, decoded, and laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.agents.sample_text import LoopHistory, SampleText
from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.sample_accounts import SampleContent, SampleState
from umbra.runtime.rollout.ledger.sample_table import SampleRow
from umbra.runtime.rollout.prompts import Prompt, PromptSet
from umbra.runtime.terminal_text import escape_unprintable
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path

Row = dict[str, Any]

_PROMPTS: Final = "prompts.msgpack"
_REMEDY: Final = "give the directory of the run's model (umbra samples --model DIR)"
NO_LONGER_KEPT: Final = "no longer kept, see rollout.ledger_gb"
_MARGIN: Final = "  | "
"""Begins each line of a sample's text, so that no text can look like a line of this command."""


def read_texts(
    index: LedgerIndex, rows: Sequence[SampleRow], run_dir: Path, model: str | None
) -> list[Row]:
    """Facts and texts of samples, as plain data. `model` is a directory with the tokenizer; None
    for the run's model. Raises DataError if there is no tokenizer, or the file of prompts is
    missing or damaged."""
    if not rows:
        return []
    tokenizer = open_tokenizer(run_dir, model)
    prompts = _find_prompts(run_dir, {row.group.prompt_id for row in rows})
    contents = index.contents(rows)
    samples: list[Row] = []
    for row in rows:
        prompt, content = prompts.get(row.group.prompt_id), contents.get(row.uid)
        samples.append(row.facts() | decode_content(tokenizer, prompt, content, row.runs()))
    return samples


def open_tokenizer(run_dir: Path, model: str | None = None) -> ModelTokenizer:
    path = tokenizer_path(run_dir)
    if model is None and not path.exists():
        raise DataError(f"{path} does not exist, so the tokenizer is unknown: {_REMEDY}")
    return ModelTokenizer.open(model or path)


def decode_content(
    tokenizer: ModelTokenizer,
    prompt: Prompt | None,
    content: SampleContent | None,
    segments: Sequence[Segment],
) -> Row:
    """A sample's text as plain data: prompt, turns, and its agent loop's records. `prompt` is None
    if the file of prompts lacks it, `content` if the ledger no longer has it."""
    is_kept = content is not None
    content = content or SampleContent()
    tokens = content.prompt if prompt is None or content.prompt is not None else prompt.tokens
    history = LoopHistory.of_records(content.recorded)
    text = SampleText.decode(
        tokenizer.decode_all,
        [] if tokens is None else tokens.tolist(),
        content.tokens.tolist(),
        segments if is_kept else [],
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
    """One sample of `read_texts`, escaped for a terminal."""
    state = [SampleState(sample["state"]).words]
    if sample["step"] is not None:
        state.append(f"step {sample['step']}")
    state += [text for text in (sample["finish_reason"], sample["drop_reason"]) if text]
    reward = "none" if sample["reward"] is None else f"{sample['reward']:g}"
    counts = [f"reward {reward}", _count(sample["num_tokens"], "token")]
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
    lines += _quoted(sample["prompt"], f"not in {_PROMPTS}")
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _find_prompts(run_dir: Path, prompt_ids: set[str]) -> dict[str, Prompt]:
    prompts = PromptSet.open(run_dir / _PROMPTS)
    try:
        return prompts.find(prompt_ids)
    finally:
        prompts.close()


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
