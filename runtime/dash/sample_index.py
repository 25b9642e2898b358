"""The samples of a run, found by step and by id while the ledger grows: each event is read once.

A text is decoded when it is asked for. Its tokens lie between the frames of the ledger in which the
sample was admitted and finished, so only those are read again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from umbra.runtime.cli.sample_texts import decode_content, open_tokenizer
from umbra.runtime.errors import ConfigError, LedgerError
from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Event,
    Finished,
    Leased,
    Restored,
    Scored,
)
from umbra.runtime.rollout.ledger.ledger_history import (
    Entry,
    Position,
    extend_history,
    ledger_folder,
    managers_of,
    read_history,
)
from umbra.runtime.rollout.ledger.ledger_replay import replay
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import SampleAccount
from umbra.runtime.rollout.ledger.sample_contents import read_contents
from umbra.runtime.rollout.prompts import PromptSet

Order = Literal["newest", "best", "worst"]
_NOT_FINISHED: Final = 1 << 62  # in place of the index of a frame


class SampleIndex:
    """The samples of one run directory. Blocking: one thread at a time may use it.

    A ledger that was begun again, because the run was started again, is read from scratch.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder_inode = 0  # a run that overwrites another one has a new folder
        self._ledger: _LedgerIndex | None = None
        self._texts: _PromptTexts | None = None

    def open(self) -> None:
        """Reads all that is there, and opens what decodes texts; raises as `sample`."""
        self.refresh()
        if self._ledger is not None:
            self._texts = _PromptTexts(self._run_dir)

    def refresh(self) -> None:
        """Reads what was written since. Raises LedgerError if a ledger is damaged."""
        managers = managers_of(self._run_dir)  # a run has one
        inode = (self._run_dir / "ledger").stat().st_ino if managers else 0
        if inode != self._folder_inode:
            self._ledger, self._texts, self._folder_inode = None, None, inode
        if managers and not (self._ledger is not None and self._ledger.read_on()):
            self._ledger = _LedgerIndex(ledger_folder(self._run_dir, managers[0]))

    def choose(
        self, order: Order, limit: int, step: int | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """The facts of at most `limit` samples, and how many there are to choose from.

        Args:
            step: from 1, as in metrics.jsonl; None for all samples.
        """
        if self._ledger is None:
            return [], 0
        chosen, num_samples = self._ledger.choose(order, limit, step)
        return [_facts(sample) for sample in chosen], num_samples

    def sample(self, sample_id: str) -> dict[str, Any]:
        """The facts and the text of one sample.

        Raises:
            ConfigError: there is no such sample, or the run's tokenizer is unknown.
            DataError: the model has no tokenizer, or the file of prompts is damaged.
            LedgerError: the ledger is damaged.
        """
        account = None if self._ledger is None else self._ledger.find(sample_id)
        if self._ledger is None or account is None:
            raise ConfigError(f"the ledger has no sample {sample_id!r}")
        if self._texts is None:
            self._texts = _PromptTexts(self._run_dir)
        return _facts(account) | self._texts.decode(self._ledger, account)


class _LedgerIndex:
    """The samples of one ledger."""

    def __init__(self, folder: Path) -> None:
        self._samples: list[SampleAccount] = []  # by uid
        self._rewards = array("d")  # by uid, NaN for none
        self._frames: list[Position] = []  # where each begins
        self._spans: list[tuple[int, int]] = []  # by uid, the first and the last index of frames
        self._uids: dict[int, list[int]] = {}  # by step, of the last lease
        self._first_uids: dict[str, int] = {}  # by group
        self._history = read_history(folder)
        self._state = replay(self._history.entries, on_event=self._on_event, keeps_tokens=False)

    def read_on(self) -> bool:
        """Reads what was written since; False if that cannot follow what was read."""
        history = extend_history(self._history)
        if history is None:
            return False
        start, self._history = self._history.end, history
        try:
            for entry in history.entries(start):
                for event in entry.batch.events:
                    self._state.apply(event)
                    self._on_event(entry, event, self._state)
        except LedgerError:  # such as a return to a checkpoint, whose tokens were released
            return False
        return True

    def choose(self, order: Order, limit: int, step: int | None) -> tuple[list[SampleAccount], int]:
        """As `SampleIndex.choose`. Of equal rewards, the newest come first."""
        found = range(len(self._samples)) if step is None else self._uids.get(step - 1, ())
        uids = np.asarray(found, np.int64)[::-1]
        if order == "newest":
            newest = (self._samples[uid] for uid in reversed(found))
            return list(islice((s for s in newest if s.num_tokens), limit)), len(uids)
        rewards = np.array(self._rewards)[uids]
        by_reward = uids[np.argsort(-rewards if order == "best" else rewards, kind="stable")]
        num_scored = np.count_nonzero(~np.isnan(rewards))
        return [self._samples[uid] for uid in by_reward[: min(limit, num_scored)]], len(uids)

    def find(self, sample_id: str) -> SampleAccount | None:
        group_id, _, number = sample_id.rpartition("/")
        first = self._first_uids.get(group_id)
        if first is None or not number.isdecimal() or first + int(number) >= len(self._samples):
            return None
        found = self._samples[first + int(number)]
        return found if found.sample_id == sample_id else None

    def events_of(self, sample: SampleAccount) -> Iterable[Event]:
        """All events between the sample's first and last one."""
        first, last = self._spans[sample.uid]
        stop = self._frames[last + 1] if last + 1 < len(self._frames) else None
        for entry in self._history.entries(self._frames[first], stop):
            yield from entry.batch.events

    def _on_event(self, entry: Entry, event: Event, state: LedgerState) -> None:
        if not self._frames or self._frames[-1] != entry.position:
            self._frames.append(entry.position)
        frame_idx = len(self._frames) - 1
        match event:
            case Admitted():
                group = state.group(event.group_id)
                self._samples.extend(group.samples)
                self._rewards.extend([math.nan] * len(group.samples))
                self._spans.extend([(frame_idx, _NOT_FINISHED)] * len(group.samples))
                self._first_uids[event.group_id] = event.first_uid
            case Finished():
                for uid in event.uids.tolist():
                    self._spans[uid] = (self._spans[uid][0], frame_idx)
            case Scored():
                for uid, reward in zip(event.uids.tolist(), event.rewards.tolist(), strict=True):
                    self._rewards[uid] = reward
            case Leased():
                self._uids.setdefault(event.step, []).extend(event.uids.tolist())
            case Restored():
                for step in [step for step in self._uids if step >= event.step]:
                    del self._uids[step]
                for sample in self._samples:
                    if sample.reward is None:
                        self._rewards[sample.uid] = math.nan
                        self._spans[sample.uid] = (self._spans[sample.uid][0], _NOT_FINISHED)
            case _:
                pass


class _PromptTexts:
    """What decodes the samples of a run: its tokenizer, and where each prompt is in their file."""

    def __init__(self, run_dir: Path) -> None:
        self._tokenizer = open_tokenizer(run_dir)
        self._prompts = PromptSet.open(run_dir / "prompts.msgpack")
        self._idx_by_id = {self._prompts[idx].prompt_id: idx for idx in range(len(self._prompts))}

    def decode(self, ledger: _LedgerIndex, sample: SampleAccount) -> dict[str, Any]:
        wanted = {sample.uid: sample.num_tokens}
        content = read_contents(ledger.events_of(sample), wanted)[sample.uid]
        idx = self._idx_by_id.get(sample.group.prompt_id)
        prompt = None if idx is None else self._prompts[idx]
        return decode_content(self._tokenizer, prompt, content, sample.segments())


def _facts(sample: SampleAccount) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "prompt_id": sample.group.prompt_id,
        "state": sample.state.words,
        "step": None if sample.step is None else sample.step + 1,
        "reward": sample.reward,
        "num_tokens": sample.num_tokens,
        "finish_reason": sample.finish_reason,
        "drop_reason": sample.drop_reason,
        "versions": sorted({segment.version for segment in sample.segments()} - {-1}),
        "interruptions": sample.num_interruptions,
        "resets": sample.num_resets,
    }
