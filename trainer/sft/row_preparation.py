"""Tokenizes the rows of a run, and records its settings. Rank 0 only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from umbra.runtime.disk import replacing
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.text.model_files import default_context_len
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.checkpoint.run_dir import (
    BEGAN_AT,
    NEW_RUN,
    RunDir,
    changed_settings,
    recorded_identity,
    run_began_at,
)
from umbra.trainer.config import setting_rules
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.data.sft_rows import SftRow, SftRows
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.world.run_files import writing


def prepare_rows(
    config: SftConfig, resumed_from: Path | None, display: ProgressDisplay
) -> tuple[int, dict[str, object]]:
    """Writes the rows to the run directory. Returns the number of those to learn, and what
    `record_settings` is to keep of them. Raises DataError with file, line, cause and remedy, and
    ConfigError if `resumed_from` is a checkpoint of this run and its next steps would have other
    rows."""
    data, run_dir = config.data, RunDir(config.run.dir)
    with display.activity("tokenizing the data", unit="rows") as progress:
        rows = read_rows(config, lambda text: display.note(f"warning: {text}"), progress.count)
    train = rows["train"]
    identity: dict[str, object] = {
        "train.seed": config.train.seed,
        "data.shuffle": data.shuffle,
        "sft.batch_size": config.sft.batch_size,
        BEGAN_AT: run_began_at(config.run.dir).isoformat(),
        "the digest of data.train's tokens": train.digest(),
    }
    if resumed_from is not None and run_dir.holds(resumed_from):
        before = recorded_identity(config.run.dir)
        for name, now in identity.items():
            if name in before and before[name] != now:
                raise ConfigError(
                    f"{name} is {now!r} and was {before[name]!r} when the run began: it decides "
                    f"which rows a step has. Set it back, or {NEW_RUN}"
                )
    for name, found in rows.items():
        found.write(run_dir.rows / name)
    display.note(summary_of(rows))
    _show_settings(config.with_steps(len(train)), len(train), display)
    return len(train), identity


def read_rows(
    config: SftConfig, warn: Callable[[str], None], on_row: Callable[[], None] = lambda: None
) -> dict[str, RowFiles]:
    """The rows "train", and "eval" if there are any. Raises DataError, see `prepare_rows`."""
    data, reader = config.data, _RowReader(config, warn, on_row)
    rows = {"train": reader.read("data.train", data.train_files)}
    if data.eval is not None:
        rows["eval"] = reader.read("data.eval", data.eval_files, data.eval_limit)
    return rows


def summary_of(rows: Mapping[str, RowFiles]) -> str:
    train = rows["train"]
    held_out = f", {len(rows['eval']):,} held out" if "eval" in rows else ""
    return f"{len(train):,} rows with {int(train.mask.sum()):,} tokens to learn{held_out}"


def _show_settings(config: SftConfig, num_rows: int, display: ProgressDisplay) -> None:
    warnings = setting_rules.warnings(config)
    if num_rows < config.sft.batch_size:
        warnings.append(
            f"sft.batch_size = {config.sft.batch_size} is more than the {num_rows} rows of "
            "data.train: a step has some of them more than once"
        )
    if config.train.epochs is not None:
        display.note(f"train.epochs = {config.train.epochs} are {config.train.total_steps:,} steps")
    for text in warnings:
        display.note(f"warning: {text}")
    if changed := changed_settings(config):
        display.note(f"changed since the last start: {', '.join(changed)}")


class _RowReader:
    def __init__(
        self, config: SftConfig, warn: Callable[[str], None], on_row: Callable[[], None]
    ) -> None:
        model, began_at = config.model, run_began_at(config.run.dir)
        self._tokenizer = ModelTokenizer.open(
            model.path, trust_remote_code=model.trust_remote_code, began_at=began_at
        )
        self._max_len = config.sft.max_len or default_context_len(model.path)
        self._source = SftRows(data=config.data, sft=config.sft, max_len=self._max_len)
        self._warn = warn
        self._on_row = on_row

    def read(self, key: str, paths: Sequence[Path], limit: int = 0) -> RowFiles:
        """The rows of the setting `key`, of which the first `limit` count (0: all)."""
        num_dropped = num_endless = 0

        def fitting() -> Generator[SftRow]:
            nonlocal num_dropped, num_endless
            rows = chain.from_iterable(self._source.read(path, self._tokenizer) for path in paths)
            num_found = 0
            for row in rows:
                self._on_row()
                if row is None:
                    num_dropped += 1
                    continue
                learned = row.tokens[row.mask.astype(bool)]
                num_endless += not np.isin(learned, self._tokenizer.end_token_ids).any()
                yield row
                num_found += 1
                if num_found == limit:
                    return

        found = RowFiles.collect(fitting())
        if not len(found):
            why = "all of its rows are too long" if num_dropped else "it has no rows"
            raise DataError(f"{key}: {', '.join(map(str, paths))} is empty: {why}")
        if num_dropped:
            self._warn(
                f"{key}: left out {num_dropped} rows of more tokens than sft.max_len = "
                f"{self._max_len}"
            )
        if num_endless == len(found):
            ends = (
                repr(self._tokenizer.decode_all([token])) for token in self._tokenizer.end_token_ids
            )
            self._warn(
                f"{key}: no row has an end token ({', '.join(ends)}) among those to learn, so that "
                "the model does not learn to end its answers: add the one of the chat template to "
                "eos_token_id in generation_config.json of model.path, or check sft.max_len"
            )
        return found


@dataclass(frozen=True, slots=True)
class RowFiles:
    """The tokenized rows of a run, R rows of T tokens in all: written by rank 0, mapped by all.

    RUN_DIR/rows/train/    tokens.npy  mask.npy  offsets.npy
    RUN_DIR/rows/eval/     the same, held out
    """

    tokens: NDArray[np.int32]  # [T]
    mask: NDArray[np.uint8]  # [T], 1 where learned
    offsets: NDArray[np.int64]  # [R + 1]

    @classmethod
    def collect(cls, rows: Iterable[SftRow]) -> Self:
        tokens, mask, offsets = array("i"), array("B"), array("q", [0])
        for row in rows:
            tokens.frombytes(row.tokens.tobytes())
            mask.frombytes(row.mask.tobytes())
            offsets.append(len(tokens))
        return cls(
            np.frombuffer(tokens, np.int32),
            np.frombuffer(mask, np.uint8),
            np.frombuffer(offsets, np.int64),
        )

    def write(self, folder: Path) -> None:
        """Raises RunDirectoryError if the disk is full or the like."""
        with writing("write", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("tokens", "mask", "offsets"):
                with replacing(folder / f"{name}.npy") as file:
                    np.save(file, getattr(self, name))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises RunDirectoryError on a node that does not have the run directory, or the like."""
        names = ("tokens", "mask", "offsets")
        with writing("read", folder):
            return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in names))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def span(self, row: int) -> slice:
        """The tokens of a row."""
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def digest(self) -> str:
        parts = xxhash.xxh3_128()
        for values in (self.tokens, self.mask, self.offsets):
            parts.update(np.ascontiguousarray(values).data)
        return parts.hexdigest()
