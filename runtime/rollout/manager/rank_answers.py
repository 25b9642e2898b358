from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from umbra.runtime.rollout.buffer.batch_columns import batch_metrics, rank_columns
from umbra.runtime.rollout.buffer.batch_plan import plan_batch
from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.manager.evaluation import Evaluation
from umbra.runtime.rollout.manager.evaluation_samples import worst_and_best
from umbra.runtime.rollout.manager.evaluation_scores import evaluation_scores
from umbra.runtime.rollout.rollout_config import RolloutConfig


class BatchAnswers:
    """Each rank's part of a batch, planned once: micro-batches, balanced by tokens."""

    def __init__(
        self, groups: Sequence[Group], config: RolloutConfig, metrics: Mapping[str, float]
    ) -> None:
        self.groups = groups
        self._plans = plan_batch(
            [group.shape() for group in groups],
            config.world_size,
            num_micro_batches=config.num_micro_batches,
            max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        )
        samples = [sample for group in groups for sample in group.trajectories]
        self._shared = {
            "kind": "batch",
            "metrics": {**batch_metrics(groups), **metrics},
            "loss_tokens_global": sum(sample.num_generated for sample in samples),
            "num_samples_global": len(samples),
        }

    def of(self, rank: int) -> dict[str, Any]:
        return {**self._shared, **rank_columns(self.groups, self._plans[rank])}


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
    }
