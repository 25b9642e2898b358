"""Splits a batch over ranks and micro-batches. W: ranks, M: micro-batches per rank.

A rank's time is that of its micro-batches, and all ranks meet after each one (FSDP gathers
parameters together). The m-th micro-batch should therefore cost about the same on every rank. Cost
is the number of tokens to compute: completions, and each distinct prompt once, since a trainer that
packs computes a prompt once for all samples that share it. Groups therefore stay together unless
one is far more than a micro-batch's fair share; every rank gets the rewards of the whole group.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from umbra.runtime.rollout.dispatch.group import GroupShape

# A group costing this many times a micro-batch's fair share is split. Lower balances better and
# computes its prompt more often; higher makes the other ranks wait for the one that got it.
_SPLIT_RATIO: Final = 1.25


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's share.

    Attributes:
        samples: indices of its samples in the global batch, ascending.
        micro_batches: M lists of positions in `samples`; an empty one is padding of weight
            zero, there so that every rank runs the same number.
    """

    samples: list[int]
    micro_batches: list[list[int]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Samples of one group that stay together."""

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

    With a cap, there are as many micro-batches as it takes to keep each one's cost within it; a
    sample beyond the cap gets one of its own. Without a cap, each rank has `num_micro_batches`.
    Every sample is dealt exactly once. Every rank gets the same number of micro-batches, at least
    one, even if there are fewer samples than ranks.
    """
    num_samples = sum(len(group.lengths) for group in groups)
    if num_samples == 0:
        raise ValueError("an empty batch cannot be planned")
    cap = max_tokens_per_micro_batch
    if not cap:
        return _deal(_pack(groups, world_size * num_micro_batches, 0), world_size)
    total = sum(group.prompt_len + sum(group.lengths) for group in groups)
    for count in range(max(1, total // (cap * world_size)), num_samples + 1):
        bins = _pack(groups, world_size * count, cap)
        if all(one.cost <= cap or len(one.samples) == 1 for one in bins):
            break
    else:
        bins = _pack(groups, num_samples, 1)  # every sample alone
    return _deal(bins, world_size)


def _pack(groups: Sequence[GroupShape], num_bins: int, cap: int) -> list[_Piece]:
    """At most `num_bins` bins of about equal cost: the costliest piece goes to the lightest bin."""
    total = sum(group.prompt_len + sum(group.lengths) for group in groups)
    limit = max(1, int(_SPLIT_RATIO * total / num_bins))
    pieces: list[_Piece] = []
    first = 0
    for group in groups:
        pieces += _split(group, first, min(limit, cap) if cap else limit)
        first += len(group.lengths)
    pieces.sort(key=lambda piece: (-piece.cost, piece.samples))
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    fill = [(0, 0, idx) for idx in range(num_bins)]  # cost, pieces, bin
    for piece in pieces:
        cost, size, idx = heapq.heappop(fill)
        bins[idx] += piece.samples
        heapq.heappush(fill, (cost + piece.cost, size + 1, idx))
    costs = {idx: cost for cost, _, idx in fill}
    return [_Piece(costs[idx], samples) for idx, samples in enumerate(bins) if samples]


def _split(group: GroupShape, first: int, limit: int) -> list[_Piece]:
    """The group whole, or in the fewest pieces of about equal cost within `limit`.

    Args:
        first: index of its first sample in the global batch.
    """
    lengths = group.lengths
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    pieces: list[_Piece] = []
    for count in range(1, len(lengths) + 1):
        fill = [(group.prompt_len, 0, idx) for idx in range(count)]  # cost, samples, piece
        members: list[list[int]] = [[] for _ in range(count)]
        for sample in order:
            cost, size, idx = heapq.heappop(fill)
            members[idx].append(first + sample)
            heapq.heappush(fill, (cost + lengths[sample], size + 1, idx))
        pieces = [_Piece(cost, members[idx]) for cost, _, idx in sorted(fill)]
        if max(piece.cost for piece in pieces) <= limit:
            break
    return pieces


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
