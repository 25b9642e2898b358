"""Decides which requests run next, and how long a cache row must be: no tensors, no clock.

All rows have one capacity, which climbs and falls in steps with the longest running sequence. Fewer
long rows fit than short ones, so a sequence that outgrows the capacity may cost others their row:
they return to the head of the queue and are recomputed later, exactly.

Requests are served in order of arrival: one that does not fit blocks all later ones,
so none starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from umbra.runtime.errors import ConfigError

MIN_CAPACITY: Final = 64
# Tokens of the shortest row. A smaller number moves the cache more often while sequences grow; a
# larger one wastes memory on short sequences.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine.

    Attributes:
        kv_cache_num_tokens: tokens of all rows together.
        prefill_num_tokens: tokens of a prefill batch, padding included. A larger number
            stalls running sequences longer and takes more memory; a smaller one makes less
            efficient batches.
    """

    max_num_seqs: int
    max_context_len: int
    kv_cache_num_tokens: int
    prefill_num_tokens: int = 8192

    def __post_init__(self) -> None:
        for key in ("max_num_seqs", "max_context_len", "prefill_num_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.kv_cache_num_tokens < self.max_context_len:
            raise ConfigError(
                f"kv_cache_num_tokens={self.kv_cache_num_tokens} cannot hold one sequence of "
                f"max_context_len={self.max_context_len}; raise the first or lower the second"
            )

    def capacity_for(self, num_tokens: int) -> int:
        assert num_tokens <= self.max_context_len
        capacity = MIN_CAPACITY
        while capacity < num_tokens:
            capacity *= 2
        return min(capacity, self.max_context_len)

    def num_rows(self, capacity: int) -> int:
        return min(self.max_num_seqs, self.kv_cache_num_tokens // capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPlan:
    """The first `count` waiting requests start, on rows of `capacity` tokens."""

    count: int
    capacity: int


def plan_admission(
    limits: Limits,
    *,
    waiting_lens: Sequence[int],
    num_running: int,
    longest_running: int,
    capacity: int,
) -> AdmissionPlan:
    """How many requests of the queue's head start now. Lengths are in tokens; `longest_running` is
    0 when none runs."""
    count, longest = 0, longest_running
    longest_prompt = 0
    for num_tokens in waiting_lens:
        longest_prompt = max(longest_prompt, num_tokens)
        if count and longest_prompt * (count + 1) > limits.prefill_num_tokens:
            break
        candidate = max(longest, num_tokens)
        needed = limits.capacity_for(candidate)
        if num_running + count + 1 > limits.num_rows(needed):
            break
        count, longest = count + 1, candidate
    if count == 0:
        return AdmissionPlan(count=0, capacity=capacity)
    needed = limits.capacity_for(longest)
    # Rows shrink only to admit a request, because shrinking moves the whole cache.
    fits = needed <= capacity and num_running + count <= limits.num_rows(capacity)
    return AdmissionPlan(count=count, capacity=capacity if fits else needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Rows become `capacity` tokens long after `evicted` (row indices) have left."""

    capacity: int
    evicted: tuple[int, ...]


def plan_growth(
    limits: Limits, *, lens: Sequence[int], arrivals: Sequence[int], capacity: int
) -> Growth:
    """Evicts as few rows as possible so that sequences that outgrew their rows fit. `lens` are the
    tokens of each row in the coming step, `arrivals` its index in the order of arrival."""
    outgrown = [row for row, num_tokens in enumerate(lens) if num_tokens > capacity]
    if not outgrown:
        return Growth(capacity=capacity, evicted=())
    needed = limits.capacity_for(max(lens))
    num_excess = len(lens) - limits.num_rows(needed)
    if num_excess <= 0:
        return Growth(capacity=needed, evicted=())
    if len(outgrown) < num_excess:
        return Growth(capacity=capacity, evicted=tuple(outgrown))
    youngest_first = sorted(range(len(lens)), key=lambda row: arrivals[row], reverse=True)
    return Growth(capacity=needed, evicted=tuple(youngest_first[:num_excess]))
