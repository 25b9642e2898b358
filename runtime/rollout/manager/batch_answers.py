"""Splits a batch over ranks and micro-batches. W: ranks, M: micro-batches per rank.

All ranks meet after each micro-batch (FSDP gathers parameters together), so the m-th micro-batch
should cost about the same on every rank. Cost is the number of tokens to compute: completions, and
each distinct prompt once, since a trainer that packs computes a prompt once for all its samples.
Groups therefore stay together unless one is far more than a micro-batch's fair share.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from umbra.runtime.rollout.dispatch.trajectory import (
    NOT_GENERATED,
    Group,
    GroupShape,
    Trajectory,
    tokens_by_version,
)
from umbra.runtime.rollout.manager.evaluation import Evaluation, evaluation_scores, worst_and_best
from umbra.runtime.rollout.rollout_config import BatchLayout, RolloutConfig


class BatchAnswers:
    """Each rank's part of a batch, planned once: mini-batches of whole groups, and in each of them
    micro-batches, balanced by tokens."""

    def __init__(
        self,
        groups: Sequence[Group],
        layout: BatchLayout,
        world_size: int,
        metrics: Mapping[str, float],
    ) -> None:
        self.groups = groups
        bounds = [len(groups) * k // layout.mini_batches for k in range(layout.mini_batches + 1)]
        self._mini_batches = [
            _MiniBatch(groups[start:stop], layout, world_size)
            for start, stop in itertools.pairwise(bounds)
        ]
        self._mask_truncated = layout.mask_truncated
        self._metrics = {**batch_metrics(groups), **metrics}

    def of(self, rank: int) -> dict[str, Any]:
        samples: list[int] = []
        mini_batches: list[list[Any]] = []
        first = 0
        for each in self._mini_batches:
            plan, position = each.plans[rank], len(samples)
            samples += [first + sample for sample in plan.samples]
            micro_batches = [[position + at for at in one] for one in plan.micro_batches]
            mini_batches.append([micro_batches, each.num_tokens, each.num_samples])
            first += each.num_samples
        return {
            "kind": "batch",
            "metrics": self._metrics,
            "mini_batches": mini_batches,
            **rank_columns(self.groups, samples, mask_truncated=self._mask_truncated),
        }


class _MiniBatch:
    """The groups of one optimizer step."""

    def __init__(self, groups: Sequence[Group], layout: BatchLayout, world_size: int) -> None:
        self.plans = plan_batch(
            [group.shape() for group in groups],
            world_size,
            num_micro_batches=layout.num_micro_batches,
            max_tokens_per_micro_batch=layout.max_tokens_per_micro_batch,
        )
        samples = [sample for group in groups for sample in group.trajectories]
        self.num_tokens = sum(
            sample.num_generated
            for sample in samples
            if not (layout.mask_truncated and sample.finish_reason == "length")
        )
        self.num_samples = len(samples)


def evaluation_outcome(evaluation: Evaluation, config: RolloutConfig) -> dict[str, Any]:
    metrics = batch_metrics(evaluation.groups)
    rewards = np.concatenate([group.rewards for group in evaluation.groups])
    return {
        "kind": "eval",
        **evaluation_scores(rewards.reshape(-1, config.eval_samples), config),
        "tokens": metrics["tokens"],
        "gen_s": evaluation.gen_s,
        "completion_len_mean": metrics["completion_len_mean"],
        "truncated_share": metrics["truncated_share"],
        "samples": worst_and_best(evaluation.groups),
        "versions": sorted(tokens_by_version(evaluation.groups).items()),
    }


def rank_columns(
    groups: Sequence[Group], members: Sequence[int], *, mask_truncated: bool = False
) -> dict[str, Any]:
    """One rank's columns of the global batch `groups`; `members` are the indices of its samples.

    A group may be split over ranks, so each rank gets the rewards of all its groups whole:
        group_rewards: [K, sum G] float32, `compared_rewards` of every group that the rank has a
            sample of.
        group_offsets: [groups + 1] int32, the start of each of these groups in a row.
        reward_indices: [N] int32, the index of each of the rank's samples in a row.

    With a teacher, "teacher_logprobs" [T] are the teacher's of completion tokens.
    """
    starts = [0, *itertools.accumulate(len(group.trajectories) for group in groups)]
    owners = [bisect.bisect(starts, sample) - 1 for sample in members]
    indices = [sample - starts[owner] for sample, owner in zip(members, owners, strict=True)]
    samples = [groups[owner].trajectories[idx] for owner, idx in zip(owners, indices, strict=True)]
    offsets = np.zeros(len(samples) + 1, np.int32)
    np.cumsum([len(sample) for sample in samples], out=offsets[1:])
    tokens = np.empty(offsets[-1], np.int32)
    logprobs = np.zeros(offsets[-1], np.float32)
    versions = np.full(offsets[-1], NOT_GENERATED, np.int64)
    mask = np.zeros(offsets[-1], np.uint8)
    has_teacher = groups[0].trajectories[0].teacher_logprobs is not None
    teacher = np.zeros(offsets[-1], np.float32) if has_teacher else None
    for start, sample in zip(offsets.tolist(), samples, strict=False):
        middle = start + len(sample.prompt_tokens)
        stop = start + len(sample)
        tokens[start:middle] = sample.prompt_tokens
        tokens[middle:stop] = sample.tokens
        logprobs[middle:stop] = sample.logprobs
        versions[middle:stop] = sample.versions
        if teacher is not None:
            teacher[middle:stop] = sample.teacher_logprobs
        if not (mask_truncated and sample.finish_reason == "length"):
            mask[middle:stop] = sample.versions != NOT_GENERATED
    return {
        "tokens": tokens,
        "offsets": offsets,
        "prompt_lens": np.asarray([len(s.prompt_tokens) for s in samples], np.int32),
        "mask": mask,
        "logprobs": logprobs,
        "versions": versions,
        **({} if teacher is None else {"teacher_logprobs": teacher}),
        "rewards": np.asarray([_reward(s) for s in samples], np.float32),
        **_group_columns(groups, owners, indices),
        "group_ids": [groups[owner].group_id for owner in owners],
        "sample_ids": [sample.sample_id for sample in samples],
        "finish_reasons": [sample.finish_reason for sample in samples],
    }


def _group_columns(
    groups: Sequence[Group], owners: Sequence[int], indices: Sequence[int]
) -> dict[str, Any]:
    used, positions = np.unique(np.asarray(owners, np.int64), return_inverse=True)
    whole = [groups[int(owner)].compared_rewards for owner in used]
    offsets = np.zeros(len(whole) + 1, np.int32)
    np.cumsum([rewards.shape[1] for rewards in whole], out=offsets[1:])
    none = np.zeros((len(groups[0].parts) or 1, 0), np.float32)
    return {
        "group_rewards": np.concatenate([none, *whole], axis=1),
        "group_offsets": offsets,
        "reward_indices": (offsets[positions] + np.asarray(indices, np.int64)).astype(np.int32),
    }


def _reward(sample: Trajectory) -> float:
    assert sample.reward is not None, f"{sample.sample_id} has no reward"
    return sample.reward


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the global batch, the same on every rank."""
    samples = [sample for group in groups for sample in group.trajectories]
    rewards = np.asarray([_reward(sample) for sample in samples], np.float64)
    lengths = np.asarray([sample.num_generated for sample in samples], np.float64)
    spans = [sample.segments() for sample in samples]
    generated = [sum(s.version != NOT_GENERATED for s in segments) for segments in spans]
    versions = [s.version for segments in spans for s in segments if s.version != NOT_GENERATED]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_max": float(rewards.max()),
        "reward_min": float(rewards.min()),
        "zero_variance_groups": float(sum(group.has_zero_variance for group in groups)),
        "tokens": float(lengths.sum()),
        "completion_len_mean": float(lengths.mean()),
        "completion_len_max": float(lengths.max()),
        "truncated_share": float(np.mean([s.finish_reason == "length" for s in samples])),
        "segments_per_trajectory": float(np.mean(generated)),
        "interruptions": float(sum(sample.num_interruptions for sample in samples)),
        "refilled_tokens": float(sum(sample.num_refilled_tokens for sample in samples)),
        **_part_means(samples),
        **(
            {"version_min": float(min(versions)), "version_max": float(max(versions))}
            if versions
            else {}
        ),
    }


def _part_means(samples: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each reward function over the samples that it applies to."""
    values = defaultdict[str, list[float]](list)
    for sample in samples:
        for name, value in sample.reward_parts.items():
            if not math.isnan(value):
                values[name].append(value)
    return {f"reward/{name}_mean": math.fsum(found) / len(found) for name, found in values.items()}


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
