"""The settings of supervised fine-tuning: the sections that it shares with RL training, and `[sft]`
in the place of rollouts and rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal, Self

from pydantic import ConfigDict

from umbra.runtime.engine_api.pool_settings import PoolSettings
from umbra.runtime.settings import Positive, Settings
from umbra.trainer.config.trainer_config import (
    STRICT,
    DataSection,
    ModelSection,
    RewardSection,
    RunSection,
    TrainerConfig,
    TrainSection,
)

RL_ONLY: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("trace", "metrics_address"),
    "data": ("continue_final_message", "id_column", "teacher_template"),
    "train": (
        "mini_batches",
        "updates_per_batch",
        "loss",
        "clip_eps_low",
        "clip_eps_high",
        "dual_clip",
        "loss_args",
        "importance_level",
        "importance_cap",
        "importance_above_cap",
        "importance_floor",
        "advantage",
        "advantage_norm",
        "loss_aggregation",
        "mask_truncated",
        "kl_coef",
        "kl_in_reward",
        "reference_every",
        "kl_estimator",
        "teacher_kl_coef",
        "max_logprob_difference",
        "entropy_coef",
        "log_entropy",
        "offload",
        "eval_beside",
        "keep_best_by",
    ),
}
"""Settings of the shared sections that have no effect in SFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSection(Settings):
    """`[sft]`: what supervised fine-tuning (`python -m umbra.trainer.sft`) learns from `[data]`.

    Attributes:
        batch_size: Rows of an optimizer step, over all ranks. Larger batches make steps slower and
            gradients less noisy.
        completion_column: Column of what follows the prompt: text, or messages behind the prompt's.
            A chat whose last message is the assistant's needs none.
        loss_on: Which of the assistant's messages the loss is on: "all", or the "last" one of each
            row. Of a row with a completion, those of its prompt never count.
        max_len: Largest number of tokens of a row; `data.overlong` says what happens to longer
            ones. Default: the model's max_position_embeddings, at most 4096.
    """

    batch_size: Positive = 32
    completion_column: str = "completion"
    loss_on: Literal["all", "last"] = "all"
    max_len: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    sft: SftSection = SftSection()
    train: TrainSection

    @property
    def run_name(self) -> str:
        return self.as_trainer_config().run_name

    def as_trainer_config(self) -> TrainerConfig:
        """The same model, data and optimizer as RL training has them; all else is a default."""
        return TrainerConfig(
            run=self.run,
            model=self.model,
            data=self.data,
            reward=RewardSection(),
            pool=PoolSettings(max_context_len=self.sft.max_len),
            train=self.train,
        )

    def with_paths_of(self, local: TrainerConfig) -> Self:
        """With the model and data of `as_trainer_config`, downloaded."""
        return replace(self, model=local.model, data=local.data)

    def with_steps(self, num_rows: int) -> Self:
        """With `train.steps` for `train.epochs` over `num_rows` rows."""
        if self.train.epochs is None:
            return self
        # Rounded first: 1.1 passes over 10 rows are 11.000000000000002 steps of one row.
        steps = math.ceil(round(self.train.epochs * num_rows / self.sft.batch_size, 6))
        return replace(self, train=replace(self.train, steps=steps))
