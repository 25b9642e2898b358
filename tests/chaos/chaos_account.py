"""Holds what came back against what had to come: counts what is lost, twice, torn or wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from chaos_oracle import Oracle, Sample
from chaos_plan import ChaosPlan

VIOLATIONS: Final[Sequence[str]] = (
    "lost",
    "duplicated",
    "strangers",
    "broken_groups",
    "token_mismatches",
    "wrong_version",
    "versions_going_back",
    "wrong_finishes",
    "wrong_rewards",
)
"""Counted by name; all have to be 0. Trajectories, but for `broken_groups`, and for
`token_mismatches` and `wrong_version`, which are tokens."""


class Account:
    """Takes every batch, in order.

    Attributes:
        counts: of `VIOLATIONS`.
        ages: tokens by their age in optimizer steps when they were handed out.
        num_resumed: trajectories whose tokens are of several versions.
    """

    def __init__(self, plan: ChaosPlan, oracle: Oracle) -> None:
        self._plan = plan
        self._oracle = oracle
        self._seen: set[str] = set()
        self._examples: dict[str, str] = {}
        self.counts = Counter(dict.fromkeys(VIOLATIONS, 0))
        self.ages: Counter[int] = Counter()
        self.num_tokens = 0
        self.num_resumed = 0

    @property
    def num_trajectories(self) -> int:
        """Different ones that came."""
        return len(self._seen)

    def observe(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """The batch of `step`, as every rank got its part."""
        expected = self._oracle.batch(step)
        members: Counter[str] = Counter()
        for answer in answers:
            bounds = answer["offsets"].tolist()
            for idx, sample_id in enumerate(answer["sample_ids"]):
                if sample_id in self._seen:
                    self._note("duplicated", f"{sample_id} came again in batch {step}")
                    continue
                self._seen.add(sample_id)
                sample = expected.pop(sample_id, None)
                if sample is None:
                    self._note("strangers", f"{sample_id} does not belong in batch {step}")
                    continue
                members[sample.group_id] += answer["group_ids"][idx] == sample.group_id
                self._check(step, sample_id, sample, answer, idx, bounds)
        for sample_id in expected:
            self._note("lost", f"{sample_id} did not come with batch {step}")
        for group_id, count in members.items():
            if count != self._plan.group_size:
                self._note("broken_groups", f"{group_id} has {count} members in batch {step}")

    def problems(self) -> list[str]:
        """One line for each kind of violation; empty where all is right."""
        found = [
            f"{name} is {count}, such as: {self._examples[name]}"
            for name, count in self.counts.items()
            if count
        ]
        bound = self._plan.max_staleness
        if self.ages and not 0 <= min(self.ages) <= max(self.ages) <= bound:
            found.append(f"tokens are {min(self.ages)} to {max(self.ages)} steps old: 0 to {bound}")
        return found

    # -- one trajectory ------------------------------------------------------------------

    def _check(
        self,
        step: int,
        sample_id: str,
        sample: Sample,
        answer: Mapping[str, Any],
        idx: int,
        bounds: list[int],
    ) -> None:
        own = slice(bounds[idx], bounds[idx + 1])
        prompt_len = int(answer["prompt_lens"][idx])
        completion = slice(bounds[idx] + prompt_len, bounds[idx + 1])
        whole = np.concatenate([sample.prompt, sample.tokens])
        wrong = num_different(answer["tokens"][own], whole) + abs(prompt_len - len(sample.prompt))
        self._note("token_mismatches", f"{sample_id}: {wrong} tokens are not its own", wrong)
        if answer["finish_reasons"][idx] != sample.finish_reason:
            self._note("wrong_finishes", f"{sample_id}: {answer['finish_reasons'][idx]}")
        if float(answer["rewards"][idx]) != sample.reward:
            self._note(
                "wrong_rewards", f"{sample_id}: {answer['rewards'][idx]}, not {sample.reward}"
            )
        versions, logprobs = answer["versions"][completion], answer["logprobs"][completion]
        self._check_versions(sample_id, sample, versions, logprobs)
        self._age(step, versions)

    def _check_versions(
        self,
        sample_id: str,
        sample: Sample,
        versions: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
    ) -> None:
        """Whether each token was made by the weights that it says."""
        positions = np.arange(len(versions))
        for version in np.unique(versions).tolist():
            mine = positions[versions == version]
            if self._oracle.step_of(version) is None:
                self._note("wrong_version", f"{sample_id}: no version {version}", len(mine))
                continue
            differs = logprobs[mine] != self._oracle.logprobs(version, sample.seed, mine)
            if differs.any():
                at = int(mine[differs][0])
                maker = self._maker_of(sample.seed, at, logprobs[at])
                text = f"{sample_id}: token {at} says version {version}, {maker} made it"
                self._note("wrong_version", text, int(differs.sum()))
        self.num_resumed += len(np.unique(versions)) > 1
        # In a rolling update, what an updated engine loses may go on where the older version is.
        if self._plan.update_waves == 1 and len(versions) and (np.diff(versions) < 0).any():
            self._note("versions_going_back", f"{sample_id}: {np.unique(versions).tolist()}")

    def _maker_of(self, seed: int, position: int, logprob: np.float32) -> str:
        """For the report: which version's weights give this logprob."""
        place = np.array([position])
        for version in self._oracle.versions:
            if self._oracle.logprobs(version, seed, place)[0] == logprob:
                return f"version {version}"
        return "no version"

    def _age(self, step: int, versions: npt.NDArray[np.int64]) -> None:
        for version, count in zip(*np.unique(versions, return_counts=True), strict=True):
            made_at = self._oracle.step_of(int(version))
            if made_at is not None:
                self.ages[step - made_at] += int(count)
        self.num_tokens += len(versions)

    def _note(self, name: str, example: str, count: int = 1) -> None:
        if count:
            self.counts[name] += count
            self._examples.setdefault(name, example)


def num_different(got: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> int:
    """Places at which two sequences differ; what only one of them has counts too."""
    shared = min(len(got), len(wanted))
    return int((got[:shared] != wanted[:shared]).sum()) + abs(len(got) - len(wanted))
