"""Splits a batch over ranks and micro-batches. W: ranks, M: micro-batches per rank.

All ranks meet after each micro-batch (FSDP gathers parameters together), so the m-th micro-batch
should cost about the same on every rank. Cost is the number of tokens to compute: completions, and
each distinct prompt once, since a trainer that packs computes a prompt once for all its samples.
Groups therefore stay together unless one is far more than a micro-batch's fair share.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from umbra.runtime.rollout.dispatch.trajectory import GroupShape

# A group costing this many times a micro-batch's fair share is split. Lower balances better and
# computes its prompt more often; higher makes the other ranks wait for the one that got it.
_SPLIT_RATIO: Final = 1.25


@dataclass(frozen=True, slots=True)
class RankPlan:
    samples: list[int]  # indices of its samples in the global batch, ascending
    micro_batches: list[list[int]]  # M lists of positions in `samples`; empty: padding


class _Piece(NamedTuple):
    cost: int
    samples: list[int]


def plan_batch(
    groups: Sequence[GroupShape],
    world_size: int,
    *,
    num_micro_batches: int = 1,
    max_tokens_per_micro_batch: int = 0,
) -> list[RankPlan]:
    """Deals the samples of `groups`, numbered one group after the other; returns a plan per rank.

    With a cap, there are about as few micro-batches as can keep each one's cost within it; a sample
    beyond the cap gets one of its own. Without a cap, each rank has at most `num_micro_batches`.
    Every rank gets the same number, at least one. S samples take O(S log S).
    """
    if not any(group.lengths for group in groups):
        raise ValueError("an empty batch cannot be planned")
    cap = max_tokens_per_micro_batch
    if not cap:
        return _deal(_pack(groups, world_size * num_micro_batches, 0, {}), world_size)
    least = sum(min(length, cap) for group in groups for length in group.lengths)
    num_bins = world_size * max(1, least // (cap * world_size))
    pieces: dict[int, list[_Piece]] = {}
    bins = _pack(groups, num_bins, cap, pieces)
    if len(bins) > num_bins:
        # The last bins are nearly empty. With as many from the start, all are about equal.
        num_bins = -(-len(bins) // world_size) * world_size
        equal = _pack(groups, num_bins, cap, pieces)
        bins = equal if len(equal) <= num_bins else bins
    return _deal(bins, world_size)


def _pack(
    groups: Sequence[GroupShape], num_bins: int, cap: int, pieces: dict[int, list[_Piece]]
) -> list[_Piece]:
    """Bins of about equal cost; more than `num_bins` where a cap needs it. `pieces` is a cache."""
    total = sum(group.prompt_len + sum(group.lengths) for group in groups)
    limit = int(_SPLIT_RATIO * total / num_bins)
    is_full = 0 < cap <= limit
    limit = cap if is_full else limit
    if limit not in pieces:
        starts = itertools.accumulate((len(group.lengths) for group in groups), initial=0)
        pieces[limit] = [
            _Piece(cost, [first + sample for sample in members])
            for group, first in zip(groups, starts, strict=False)
            for cost, members in _split(group, limit, is_even=not is_full)
        ]
    packed = _spread([piece.cost for piece in pieces[limit]], num_bins, cap or sys.maxsize)
    return [
        _Piece(cost, [sample for idx in members for sample in pieces[limit][idx].samples])
        for cost, members in packed
    ]


def _split(group: GroupShape, limit: int, *, is_even: bool) -> list[_Piece]:
    """The group whole, or in few pieces within `limit`, of about equal cost if `is_even`."""
    capacity = limit - group.prompt_len
    split = _spread(group.lengths, 1, capacity)
    if is_even and len(split) > 1:
        split = _spread(group.lengths, len(split), capacity)
    return [_Piece(group.prompt_len + cost, members) for cost, members in split]


def _spread(costs: Sequence[int], num_bins: int, capacity: int) -> list[_Piece]:
    """Deals items to bins, the costliest first, each to the lightest bin. An item that would exceed
    the capacity gets a new bin, which it may exceed alone. Bins that stay empty are left out."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # A heap of cost * stride + bin: comparing integers takes half as long as comparing tuples.
    stride = num_bins + len(costs)
    fill = list(range(num_bins))
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        lightest, cost = fill[0], costs[item]
        bin_items = bins[lightest % stride]
        if lightest // stride + cost > capacity and bin_items:
            heapq.heappush(fill, cost * stride + len(bins))
            bins.append([item])
        else:
            heapq.heapreplace(fill, lightest + cost * stride)
            bin_items.append(item)
    return [_Piece(key // stride, bins[key % stride]) for key in fill if bins[key % stride]]


def _deal(bins: list[_Piece], world_size: int) -> list[RankPlan]:
    """Deals bins to ranks, costliest first, forwards then backwards, which evens out the totals."""
    per_rank: list[list[list[int]]] = [[] for _ in range(world_size)]
    num_per_rank = -(-len(bins) // world_size)
    for idx, one in enumerate(sorted(bins, key=lambda one: (-one.cost, one.samples))):
        turn, rank = divmod(idx, world_size)
        per_rank[rank if turn % 2 == 0 else world_size - 1 - rank].append(one.samples)
    plans: list[RankPlan] = []
    for mine in per_rank:
        samples = sorted(sample for members in mine for sample in members)
        position = {sample: at for at, sample in enumerate(samples)}
        micro = [sorted(position[sample] for sample in members) for members in mine]
        plans.append(RankPlan(samples, micro + [[] for _ in range(num_per_rank - len(micro))]))
    return plans
