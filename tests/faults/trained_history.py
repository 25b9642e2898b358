"""The training history of a job that was killed and resumed, from its ranks' own records.

Each incarnation of the job resumes from a checkpoint. Of earlier incarnations, only the steps that
the checkpoint covers survive. The history is compared with the ledger, with the order of the data,
and with another job's history.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ledger_replay import replay

from umbra.runtime.dash.sample_texts import open_ledger
from umbra.runtime.rollout.ledger.ledger_events import Event, Leased
from umbra.runtime.rollout.ledger.ledger_history import Entry, ledger_folder, read_history
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import SampleState
from umbra.runtime.rollout.manager.admission import PromptOrder
from umbra.runtime.rollout.prompts import PromptSet
from umbra.trainer.reporting.metrics_loggers import read_metrics

LOGPROB_TOLERANCE = 1e-6
"""Tolerance of float32 logprobs that were computed in float64, in batches of other shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSample:
    """One completion that a rank trained on; tokens, logprobs and versions are the completion's."""

    sample_id: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float


History = dict[int, dict[str, TrainedSample]]
"""Samples by step and by sample id."""


def surviving_history(records: Path) -> History:
    """The steps that were trained in the end, from the files of `recorded_trainer`."""
    history: History = {}
    partial: set[int] = set()  # steps in which a kill came before every rank had its part
    for number in sorted({path.name.partition("-")[0] for path in records.iterdir()}):
        who = f"incarnation {number}"
        began, batches = _read_records(records, number)
        if began is None:
            assert not batches, f"{who} has batches and never began"
            continue
        assert began <= len(history), f"{who} resumes after {began} of {len(history)} steps"
        history = {step: history[step] for step in range(began)}
        for step in sorted(batches):
            assert step == len(history), f"{who} trained on step {step}, not {len(history)}"
            history[step] = _merged(batches[step], f"{who}, step {step}")
            partial.discard(step)
            if any(len(batches[step]) != line["world_size"] for line in batches[step].values()):
                partial.add(step)
    assert not partial & history.keys(), f"not every rank was trained on steps {sorted(partial)}"
    return history


def check_exactly_once(history: History) -> None:
    """Asserts that no sample is in two steps."""
    counts = Counter(sample_id for batch in history.values() for sample_id in batch)
    twice = [sample_id for sample_id, count in counts.items() if count > 1]
    assert not twice, f"trained more than once: {twice}"


def check_order(history: History, run_dir: Path, *, group_size: int, seed: int = 0) -> None:
    """Asserts that the history is the beginning of the data order: whole groups, none lost."""
    prompts = PromptSet.open(run_dir / "prompts.msgpack")
    order = PromptOrder(len(prompts), seed)
    trained = {sample_id for batch in history.values() for sample_id in batch}
    trained_prompts = [order.at(idx) for idx in range(len(trained) // group_size)]
    expected = {
        f"e{epoch}/{prompts[idx].prompt_id}/{k}"
        for epoch, idx in trained_prompts
        for k in range(group_size)
    }
    prompts.close()
    assert trained == expected, (sorted(trained - expected), sorted(expected - trained))


def check_ledger(history: History, run_dir: Path) -> None:
    """Asserts that the ledger has the same samples, steps, tokens and versions."""
    trained = {sample_id: step for step, batch in history.items() for sample_id in batch}
    rows, num_samples = open_ledger(run_dir).newest(None)
    assert len({row.sample_id for row in rows}) == len(rows) == num_samples
    done = [row for row in rows if row.state is SampleState.TRAINED]
    assert {row.sample_id: row.step for row in done} == trained
    held = _leased_tokens(run_dir)
    for batch in history.values():
        for sample in batch.values():
            tokens, versions, reward = held[sample.sample_id]
            assert sample.tokens == tokens, sample.sample_id
            assert sample.versions == versions, sample.sample_id
            assert abs(sample.reward - reward) < 1e-6, sample.sample_id


def check_ages(history: History, run_dir: Path, max_staleness: int) -> Counter[int]:
    """Asserts that every token is 0 to `max_staleness` steps old; returns counts by age."""
    lines = (run_dir / "versions.jsonl").read_text().splitlines()
    steps = {int(row["version"]): int(row["step"]) for row in map(json.loads, lines)}
    ages = Counter(
        step - steps[version]
        for step, batch in history.items()
        for sample in batch.values()
        for version in sample.versions
        if version >= 0
    )
    assert all(0 <= age <= max_staleness for age in ages), ages
    return ages


def check_metrics(history: History, run_dir: Path) -> None:
    """Asserts that metrics.jsonl has each step once."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    steps = [int(row["step"]) for row in rows if "time/step_s" in row]
    assert steps == [step + 1 for step in sorted(history)]


def check_same(history: History, reference: History) -> None:
    """Asserts equal samples step by step, token for token; versions may differ."""
    assert history.keys() == reference.keys()
    for step, batch in history.items():
        others = reference[step]
        assert batch.keys() == others.keys(), f"step {step}"
        for sample_id, sample in batch.items():
            other, where = others[sample_id], f"step {step}, {sample_id}"
            assert (sample.prompt, sample.tokens) == (other.prompt, other.tokens), where
            assert sample.reward == other.reward, where
            pairs = zip(sample.logprobs, other.logprobs, strict=True)
            assert all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs), where


def _read_records(
    records: Path, incarnation: str
) -> tuple[int | None, dict[int, dict[int, dict[str, Any]]]]:
    """The step that an incarnation resumes from, and its batches by step and rank."""
    began: int | None = None
    batches: dict[int, dict[int, dict[str, Any]]] = {}
    for path in records.glob(f"{incarnation}-*.jsonl"):
        rank = int(path.stem.partition("-")[2])
        for line in read_lines(path):
            if "began" in line:
                assert began is None, f"{path.name} began twice"
                began = line["began"]
            else:
                ranks = batches.setdefault(line["step"], {})
                assert rank not in ranks, f"{path.name} got step {line['step']} twice"
                ranks[rank] = line
    return began, batches


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a record; a line that a kill tore was not trained on."""
    if path.exists():
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(text)


def _merged(ranks: Mapping[int, Mapping[str, Any]], where: str) -> dict[str, TrainedSample]:
    """The samples of all ranks together."""
    merged: dict[str, TrainedSample] = {}
    for line in ranks.values():
        for fields in line["samples"]:
            sample = TrainedSample(**fields)
            assert sample.sample_id not in merged, f"{where}: {sample.sample_id} twice"
            merged[sample.sample_id] = sample
    return merged


def _leased_tokens(run_dir: Path) -> dict[str, tuple[list[int], list[int], float]]:
    """Tokens, versions and reward of each sample when it was leased last."""
    held: dict[str, tuple[list[int], list[int], float]] = {}

    def on_event(entry: Entry, event: Event, state: LedgerState) -> None:
        if isinstance(event, Leased):
            for uid in event.uids.tolist():
                sample = state.sample(uid)
                assert sample.reward is not None
                tokens, versions = sample.tokens.tolist(), sample.versions.tolist()
                held[sample.sample_id] = (tokens, versions, sample.reward)

    replay(read_history(ledger_folder(run_dir, "rollouts")).entries, on_event=on_event)
    return held
