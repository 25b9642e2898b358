"""Two results of `umbra eval` on the same prompts, compared prompt by prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
from pydantic import TypeAdapter, ValidationError

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.accuracy_statistics import paired_interval, sign_flip_p
from umbra.runtime.rollout.prompts import PromptSet
from umbra.trainer.data.prompt_preparation import PromptFiles


class PromptResult(NamedTuple):
    data: str  # digest of the data set's columns: templates may differ, questions may not
    num_right: int


SetResults = dict[str, dict[str, PromptResult]]  # by set and id


@dataclass(frozen=True, slots=True)
class StoredResults:
    """The part of results.json that is compared."""

    samples_per_prompt: int
    prompts: SetResults


def prompt_results(files: PromptFiles, num_right: Sequence[int]) -> SetResults:
    """`num_right` [P] is in the order of `files.eval_path`, which has the prompts of every set."""
    assert files.eval_path is not None
    prompts = PromptSet.open(files.eval_path)
    found: SetResults = {}
    numbered = enumerate(num_right)
    for name, size in files.eval_sets.items():
        found[name] = {}
        for idx, number in islice(numbered, size):
            data = hashlib.sha256(msgpack.packb(prompts[idx].row)).hexdigest()[:16]
            found[name][prompts[idx].prompt_id] = PromptResult(data, number)
    prompts.close()
    return found


def comparison(path_a: Path, path_b: Path) -> list[list[str]]:
    """The cells of a table: a header, a row for each set, and one for all sets together. Raises
    ConfigError if a file has no results, or they are of other prompts or numbers of samples."""
    a, b = _read(path_a), _read(path_b)
    num_each = a.samples_per_prompt
    if num_each != b.samples_per_prompt:
        raise ConfigError(
            f"{path_a} has {num_each} completions of each prompt, {path_b} has "
            f"{b.samples_per_prompt}: evaluate both with the same eval.samples"
        )
    _check_same_prompts(path_a, a.prompts, path_b, b.prompts)
    sets = {
        name: [(row.num_right, b.prompts[name][key].num_right) for key, row in rows.items()]
        for name, rows in a.prompts.items()
    }
    if len(sets) > 1:
        sets["all"] = [pair for pairs in sets.values() for pair in pairs]
    cells = [["set", "prompts", "A", "B", "B - A", "95 % interval", "A better", "B better", "p"]]
    for name, pairs in sets.items():
        right_a, right_b = np.asarray(pairs).T
        gained, a_share, b_share = right_b - right_a, right_a / num_each, right_b / num_each
        low, high = paired_interval(a_share, b_share, num_each)
        means = [
            f"{a_share.mean():.4f}",
            f"{b_share.mean():.4f}",
            f"{gained.mean() / num_each:+.4f}",
        ]
        better = [str(np.count_nonzero(gained < 0)), str(np.count_nonzero(gained > 0))]
        row = [name, str(len(pairs)), *means, f"[{low:+.4f}, {high:+.4f}]", *better]
        cells.append([*row, f"{sign_flip_p(gained):.2g}"])
    return cells


def _read(path: Path) -> StoredResults:
    try:
        return TypeAdapter(StoredResults).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        cause = ": ".join((*map(str, first["loc"]), first["msg"]))
        raise ConfigError(f"{path} is not a results.json ({cause}): evaluate again") from error


def _check_same_prompts(path_a: Path, a: SetResults, path_b: Path, b: SetResults) -> None:
    data_a, data_b = (
        {(name, key): row.data for name, rows in results.items() for key, row in rows.items()}
        for results in (a, b)
    )
    if different := {key for key, _ in data_a.items() ^ data_b.items()}:
        first = min(different)
        where = f"is only in {path_a if first in data_a else path_b}"
        if first in data_a and first in data_b:
            where = "has other columns"
        raise ConfigError(
            f"{path_a} and {path_b} have different prompts, {len(different)} in all: "
            f"{first[1]!r} {where}; evaluate both on the same data.eval, eval.sets and "
            "data.eval_limit"
        )
