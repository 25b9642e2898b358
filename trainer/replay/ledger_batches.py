from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from umbra.runtime.dash.sample_texts import PROMPTS, open_ledger
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger.sample_accounts import SampleContent
from umbra.runtime.rollout.ledger.sample_table import SampleRow
from umbra.runtime.rollout.manager.batch_answers import BatchAnswers
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.rollout.rollout_config import BatchLayout
from umbra.trainer.data.train_batch import TrainBatch


class LedgerBatches:
    """The batches that a run has trained on, from its ledger, as its rollout manager delivered
    them. Every rank has one, and reads the files itself.

    Args:
        parts: names of the parts of rewards that advantages compare apart; none for the rewards.
        has_teacher: whether samples need its logprobs.
        layout: may differ from the run's, and so may `world_size`.
    """

    def __init__(
        self,
        run_dir: Path,
        parts: Sequence[str],
        layout: BatchLayout,
        world_size: int,
        *,
        has_teacher: bool,
    ) -> None:
        self._index = open_ledger(run_dir)
        self._prompts = PromptSet.open(run_dir / PROMPTS)
        self._parts = parts
        self._has_teacher = has_teacher
        self._layout = layout
        self._world_size = world_size

    def version(self, step: int) -> int:
        """The weights in training in step `step` (from 0); 0 if they were never published."""
        return self._index.table.newest_version(step)

    def batch(self, step: int, rank: int) -> TrainBatch:
        """A rank's part of the batch of step `step` (from 0). Raises ConfigError if the ledger does
        not have all of it."""
        rows = sorted(self._index.of_step(step), key=lambda row: (row.group.order_idx, row.uid))
        contents = self._index.contents(rows, with_teacher=self._has_teacher)
        groups = [
            Group(
                group.group_id,
                [self._trajectory(row, contents) for row in members],
                group.order_idx,
                self._parts,
            )
            for group, members in groupby(rows, key=lambda row: row.group)
        ]
        answers = BatchAnswers(groups, self._layout, self._world_size, {})
        return TrainBatch.from_answer(answers.of(rank))

    def _trajectory(self, row: SampleRow, contents: Mapping[int, SampleContent]) -> Trajectory:
        content, prompt = contents.get(row.uid), self._prompts.find(row.group.prompt_id)
        if content is None or content.logprobs is None or prompt is None:
            what = "its prompt is" if prompt is None else "its tokens are"
            raise ConfigError(
                f"sample {row.sample_id} of step {(row.step or 0) + 1} cannot be trained on again: "
                f"{what} no longer kept; replay later steps"
            )
        if missing := sorted(set(self._parts) - row.reward_parts.keys()):
            raise ConfigError(
                f"the ledger has the reward of {row.sample_id} without the part {missing[0]!r}: "
                "train.advantage = 'gdpo' needs a run with several rewards"
            )
        if self._has_teacher and content.teacher_logprobs is None:
            raise ConfigError(
                f"the ledger has no teacher's logprobs of {row.sample_id}: train.teacher_kl_coef "
                "needs a run that had one"
            )
        prompt_len = len(prompt.tokens if content.prompt is None else content.prompt)
        sample = Trajectory(
            row.sample_id,
            prompt,
            row.seed,
            budget=row.num_tokens,
            max_context_len=prompt_len + row.num_tokens,
        )
        if content.prompt is not None:
            sample.extend_context(content.prompt)
        sample.append_runs(row.runs(), content.tokens, content.logprobs)
        sample.finish(row.finish_reason)
        sample.reward, sample.reward_parts = row.reward, row.reward_parts
        sample.num_interruptions = row.interruptions
        if self._has_teacher:
            sample.teacher_logprobs = content.teacher_logprobs
        return sample
