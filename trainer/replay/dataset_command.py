"""`umbra dataset`: samples of a run as a data set for supervised fine-tuning, in JSON Lines.

    {"prompt": text, "completion": text, "reward": 1.0, "step": 12, "versions": [12], ...}
    {"prompt": [message, ...], "completion": [message], ...}             where prompts are chats

`[data]` reads such prompts, and TRL such rows. Step and versions are of the policy that was trained
on the completion, and of the weights that generated it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from umbra.runtime.dash.sample_texts import PROMPTS, open_ledger
from umbra.runtime.disk import replacing, writing_output
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.sample_accounts import SampleRow
from umbra.runtime.rollout.ledger.sample_contents import SampleContent
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.prompt_content import VARIABLES, prompt_content
from umbra.trainer.replay.replay_plan import recorded_config

_CHUNK: Final = 4096
"""Samples whose tokens are read together. Fewer read more of the log again; more take memory."""


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, and prints how many samples it has and why others were left out. Raises
    ConfigError if there would be none."""
    run_dir = Path(arguments.run_dir)
    out = Path(arguments.output or f"{run_dir.absolute().name}-best.jsonl")
    if out.suffix != ".jsonl":
        raise ConfigError(f"-o {out}: the rows are JSON Lines, end the name with .jsonl")
    left_out = Counter[str]()
    rows = list(_rows(run_dir, arguments.best, arguments.min_reward, left_out))
    reasons = [f"{count:,} {reason}" for reason, count in left_out.most_common()]
    if not rows:
        reason = "; ".join(reasons) or "none has a reward that is high enough"
        raise ConfigError(f"{run_dir} has no sample for a data set: {reason}")
    with writing_output(out), replacing(out) as file:
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    print(
        f"{out}: {len(rows):,} samples, with rewards from {rows[0]['reward']:g} to "
        f"{rows[-1]['reward']:g}"
    )
    for reason in reasons:
        print(f"  left out: {reason}")
    return 0


def _rows(
    run_dir: Path, limit: int | None, min_reward: float | None, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The highest rewards first. Counts samples that are left out, by reason."""
    index, config = open_ledger(run_dir), recorded_config(run_dir)
    if not config.reward.has_functions:
        raise ConfigError(f"{run_dir} had no reward function, so its samples have no rewards")
    writer = _RowWriter(run_dir, config)
    chunk = _CHUNK if limit is None else min(_CHUNK, 2 * limit)
    written = 0
    for rows in _best_first(index, chunk):
        contents = index.contents(rows)
        for row in rows:
            if written == limit or (min_reward is not None and (row.reward or 0.0) < min_reward):
                return
            found = writer.row(row, contents.get(row.uid))
            if isinstance(found, str):
                left_out[found] += 1
                continue
            yield found
            written += 1


def _best_first(index: LedgerIndex, chunk: int) -> Iterator[list[SampleRow]]:
    """All samples with a reward, `chunk` at a time."""
    limit = seen = 0
    while seen == limit:
        limit += 8 * limit or chunk
        rows, _ = index.extremes(limit, best=True)
        for start in range(seen, len(rows), chunk):
            yield rows[start : start + chunk]
        seen = len(rows)


class _RowWriter:
    """Makes a data set's row of a sample. Raises DataError if the run's tokenizer or prompts cannot
    be read."""

    def __init__(self, run_dir: Path, config: TrainerConfig) -> None:
        self._config = config
        self._prompts = PromptSet.open(run_dir / PROMPTS)
        self._tokenizer = ModelTokenizer.open(tokenizer_path(run_dir))
        self._written: set[tuple[str, str]] = set()

    def row(self, row: SampleRow, content: SampleContent | None) -> dict[str, Any] | str:
        """The row, or why there is none."""
        prompt = self._prompts.find(row.group.prompt_id)
        if content is None or prompt is None:
            return "no longer kept, see rollout.ledger_gb"
        if row.finish_reason != "stop":
            return "truncated"
        versions = [version for _, version in row.segments]
        if content.prompt is not None or NOT_GENERATED in versions:
            return "of several turns, or with an agent loop's own prompt"
        skip = self._config.rollout.skip_special_tokens
        text = self._tokenizer.decode_completion(content.tokens.tolist(), skip)
        if (row.group.prompt_id, text) in self._written:
            return "with the text of another sample of their prompt"
        self._written.add((row.group.prompt_id, text))
        asked = prompt_content(self._config.data, f"prompt {prompt.prompt_id}", prompt.row)
        answer = text if isinstance(asked, str) else [_message(asked, text)]
        facts = row.facts()
        parts = {"reward_parts": facts["reward_parts"]} if facts["reward_parts"] else {}
        columns = {"tools": self._config.data.tools_column, VARIABLES: VARIABLES}
        for name, column in columns.items():
            if prompt.row.get(column) and not isinstance(asked, str):
                parts[name] = prompt.row[column]
        about = {name: facts[name] for name in ("reward", "step", "sample_id")}
        pair = {"prompt": asked, "completion": answer}
        return pair | about | parts | {"versions": sorted(set(versions))}


def _message(chat: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """The assistant's message. A beginning that the completion has continued leaves the chat."""
    begun = chat.pop() if chat[-1]["role"] == "assistant" else {"role": "assistant"}
    return begun | {"content": begun.get("content", "") + text}
