"""Compares results with expected ones: counts what is lost, duplicated, torn or wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from chaos_oracle import Oracle, Sample
from chaos_plan import ChaosPlan

from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import SampleAccount, SampleState

VIOLATIONS: Final[Sequence[str]] = (
    "lost",
    "duplicated",
    "strangers",
    "broken_groups",
    "lost_tokens",
    "repeated_tokens",
    "wrong_tokens",
    "wrong_logprobs",
    "wrong_version",
    "versions_going_back",
    "wrong_finishes",
    "wrong_rewards",
    "wrong_in_ledger",
)
"""Counted by name; all must be 0. They count trajectories, except `broken_groups`, and except
`..._tokens`, `wrong_logprobs` and `wrong_version`, which count tokens."""

_SURE: Final = 4
"""Tokens that identify a position in a completion. Fewer may be equal by chance."""
_SURE_AT_END: Final = 2
"""The same at the end: the last token is always a stop token."""


class Account:
    """Checks every batch, in order.

    Attributes:
        counts: of `VIOLATIONS`.
        ages: number of tokens by age, in optimizer steps at delivery.
        num_resumed: trajectories with tokens of several versions.
    """

    def __init__(self, plan: ChaosPlan, oracle: Oracle) -> None:
        self._plan = plan
        self._oracle = oracle
        self._batches: dict[str, int] = {}  # the batch in which a trajectory came first
        self._examples: dict[str, str] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(VIOLATIONS, 0))
        self.ages: Counter[int] = Counter()
        self.num_tokens = 0
        self.num_resumed = 0

    @property
    def num_trajectories(self) -> int:
        """Number of different trajectories so far."""
        return len(self._batches)

    def observe(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Checks the batch of `step`, from the parts of all ranks."""
        expected = self._oracle.batch(step)
        members: Counter[str] = Counter()
        for answer in answers:
            bounds = answer["offsets"].tolist()
            for idx, sample_id in enumerate(answer["sample_ids"]):
                if sample_id in self._batches:
                    first = self._batches[sample_id]
                    self._note("duplicated", f"{sample_id} came in batch {first} and in {step}")
                    continue
                self._batches[sample_id] = step
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

    def observe_ledger(self, ledger: LedgerState) -> None:
        """Checks the ledger at the end, when no checkpoint has folded anything."""
        accounts = {held.sample_id: held for group in ledger.groups() for held in group}
        for step in range(self._plan.num_updates):
            for sample_id, sample in self._oracle.batch(step).items():
                flaw = _flaw_in_ledger(accounts.get(sample_id), sample, step)
                if flaw:
                    self._note("wrong_in_ledger", f"{sample_id}, of batch {step}, {flaw}")

    def problems(self) -> list[str]:
        """One line for each kind of violation; empty if there is none."""
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
        first, last = bounds[idx], bounds[idx + 1]
        start = first + int(answer["prompt_lens"][idx])
        wrong = num_different(answer["tokens"][first:start], sample.prompt)
        self._note("wrong_tokens", f"{sample_id}: {wrong} tokens of the prompt", wrong)
        flaw = find_flaw(answer["tokens"][start:last], sample.tokens)
        if flaw is not None:
            text = f"{sample_id}: {flaw.num_tokens} from token {flaw.position} on"
            self._note(flaw.name, text, flaw.num_tokens)
        if answer["finish_reasons"][idx] != sample.finish_reason:
            self._note("wrong_finishes", f"{sample_id}: {answer['finish_reasons'][idx]}")
        if float(answer["rewards"][idx]) != sample.reward:
            self._note(
                "wrong_rewards", f"{sample_id}: {answer['rewards'][idx]}, not {sample.reward}"
            )
        versions, logprobs = answer["versions"][start:last], answer["logprobs"][start:last]
        self._check_versions(sample_id, versions)
        num_right = len(sample.tokens) if flaw is None else flaw.position
        self._check_makers(sample_id, sample, versions[:num_right], logprobs[:num_right])
        self._age(step, versions)

    def _check_versions(self, sample_id: str, versions: npt.NDArray[np.int64]) -> None:
        different: list[int] = np.unique(versions).tolist()
        for version in different:
            if self._oracle.step_of(version) is None:
                count = int((versions == version).sum())
                self._note("wrong_version", f"{sample_id}: no version {version}", count)
        self.num_resumed += len(different) > 1
        if len(versions) and (np.diff(versions) < 0).any():
            self._note("versions_going_back", f"{sample_id}: {different}")

    def _check_makers(
        self,
        sample_id: str,
        sample: Sample,
        versions: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
    ) -> None:
        """Checks that each token has its own logprob, from the weights of its version."""
        for version in np.unique(versions).tolist():
            if self._oracle.step_of(version) is None:
                continue
            expected = self._oracle.logprobs(version, sample.keys[: len(versions)])
            for at in np.flatnonzero((versions == version) & (logprobs != expected)).tolist():
                self._note(*self._wrong_maker(sample_id, sample, version, at, logprobs[at]))

    def _wrong_maker(
        self, sample_id: str, sample: Sample, version: int, at: int, logprob: np.float32
    ) -> tuple[str, str]:
        """The name and the text of the violation."""
        for other in self._oracle.versions:
            if self._oracle.logprobs(other, sample.keys[at : at + 1])[0] == logprob:
                text = f"{sample_id}: token {at} has version {version}, version {other} made it"
                return "wrong_version", text
        whole = self._oracle.logprobs(version, sample.keys)
        owners = np.flatnonzero(whole == logprob).tolist()
        whose = f"that of token {owners[0]}" if owners else "of none of its tokens"
        return "wrong_logprobs", f"{sample_id}: the logprob of token {at} is {whose}"

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


class Flaw(NamedTuple):
    """A difference from the expected completion: `num_tokens` from `position` on."""

    name: str
    position: int
    num_tokens: int


def find_flaw(got: npt.NDArray[np.int32], expected: npt.NDArray[np.int32]) -> Flaw | None:
    """The first difference; the tokens after it show whether tokens were lost or repeated."""
    shared = min(len(got), len(expected))
    differs = np.flatnonzero(got[:shared] != expected[:shared])
    at = int(differs[0]) if len(differs) else shared
    if at == len(got) == len(expected):
        return None
    for count in range(1, max(len(got), len(expected)) - at + 1):
        if _is_same_place(got[at:], expected[at + count :]):
            return Flaw("lost_tokens", at, count)
        if _is_same_place(got[at + count :], expected[at:]):
            return Flaw("repeated_tokens", at, count)
    return Flaw("wrong_tokens", at, num_different(got[at:], expected[at:]))


def _is_same_place(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> bool:
    """Whether both begin alike; near the end, whether they are equal."""
    if min(len(left), len(right)) >= _SURE:
        return np.array_equal(left[:_SURE], right[:_SURE])
    return len(left) in (0, *range(_SURE_AT_END, _SURE)) and np.array_equal(left, right)


def num_different(got: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> int:
    """Number of positions at which two sequences differ; missing tokens count, too."""
    shared = min(len(got), len(wanted))
    return int((got[:shared] != wanted[:shared]).sum()) + abs(len(got) - len(wanted))


def _flaw_in_ledger(held: SampleAccount | None, sample: Sample, step: int) -> str:
    """What is wrong with a sample in the ledger; "" if it is leased or trained as expected."""
    if held is None:
        return "is not there"
    if held.state not in (SampleState.LEASED, SampleState.TRAINED) or held.step != step:
        return f"is {held.state} for {held.step}"
    wrong = num_different(held.tokens, sample.tokens)
    return f"has {wrong} wrong tokens" if wrong else ""
