from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from umbra.runtime.dash.sample_texts import decode_content, open_tokenizer
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_events import GIVEN
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder, managers_of
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.sample_table import SampleRow
from umbra.runtime.rollout.prompts import PromptSet

Order = Literal["newest", "best", "worst"]


class SampleIndex:
    """The samples of one run directory, while its ledger grows. Blocking: one thread at a time may
    use it. A ledger that was begun again, because the run was started again, is read from scratch.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder_inode = 0  # a run that overwrites another one has a new folder
        self._ledger: LedgerIndex | None = None
        self._texts: _PromptTexts | None = None

    def open(self) -> None:
        """Reads the whole ledger, and opens the tokenizer and the prompts."""
        self.refresh()
        if self._ledger is not None:
            self._texts = _PromptTexts(self._run_dir)

    def refresh(self) -> None:
        managers = managers_of(self._run_dir)  # a run has one
        inode = (self._run_dir / "ledger").stat().st_ino if managers else 0
        if inode != self._folder_inode:
            self._ledger, self._texts, self._folder_inode = None, None, inode
        if self._ledger is not None:
            self._ledger.refresh()
        elif managers:
            self._ledger = LedgerIndex(ledger_folder(self._run_dir, managers[0]))

    def choose(
        self, order: Order, limit: int, step: int | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """The facts of at most `limit` samples, and their total. `step` is from 1; None: all."""
        if self._ledger is None:
            return [], 0
        step = None if step is None else step - 1
        if order == "newest":
            chosen, num_samples = self._ledger.with_tokens(limit, step)
        else:
            chosen, num_samples = self._ledger.extremes(limit, best=order == "best", step=step)
        return [_facts(row) for row in chosen], num_samples

    def sample(self, sample_id: str) -> dict[str, Any]:
        """The facts and the text of one sample. Raises ConfigError if there is no such sample, or
        the run's tokenizer is unknown; raises DataError if the model has no tokenizer, or the file
        of prompts is damaged."""
        row = None if self._ledger is None else self._ledger.find(sample_id)
        if self._ledger is None or row is None:
            raise ConfigError(f"the ledger has no sample {sample_id!r}")
        if self._texts is None:
            self._texts = _PromptTexts(self._run_dir)
        return _facts(row) | self._texts.decode(self._ledger, row)


class _PromptTexts:
    """The run's tokenizer, and where each prompt is in their file."""

    def __init__(self, run_dir: Path) -> None:
        self._tokenizer = open_tokenizer(run_dir)
        self._prompts = PromptSet.open(run_dir / "prompts.msgpack")
        self._idx_by_id = {self._prompts[idx].prompt_id: idx for idx in range(len(self._prompts))}

    def decode(self, ledger: LedgerIndex, row: SampleRow) -> dict[str, Any]:
        content = ledger.contents([row]).get(row.uid)
        idx = self._idx_by_id.get(row.group.prompt_id)
        prompt = None if idx is None else self._prompts[idx]
        return decode_content(self._tokenizer, prompt, content, row.runs())


def _facts(row: SampleRow) -> dict[str, Any]:
    versions = {version for _, version in row.segments} - {GIVEN}
    return row.facts() | {"state": row.state.words, "versions": sorted(versions)}
