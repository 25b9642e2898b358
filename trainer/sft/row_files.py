"""The tokenized rows of a run: written by rank 0, mapped by all.

    RUN_DIR/rows/train/    tokens.npy  mask.npy  offsets.npy
    RUN_DIR/rows/eval/     the same, held out

R: rows; T: their tokens, one row after the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from umbra.runtime.disk import replacing
from umbra.trainer.data.sft_rows import SftRow
from umbra.trainer.world.run_files import writing


@dataclass(frozen=True, slots=True)
class RowFiles:
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
