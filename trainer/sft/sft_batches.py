"""The batches of supervised fine-tuning. Every rank plans the whole batch and takes its part.

R: rows of a batch; N: a rank's; T: their tokens, one row after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from umbra.runtime.rollout.dispatch.trajectory import GroupShape
from umbra.runtime.rollout.manager.admission import PromptOrder
from umbra.runtime.rollout.manager.batch_plan import plan_batch
from umbra.runtime.rollout.rollout_config import BatchLayout
from umbra.trainer.data.train_batch import MiniBatch, RewardGroups, TrainBatch
from umbra.trainer.sft.row_files import RowFiles

_NO_GROUPS: Final = RewardGroups(
    np.zeros((1, 0), np.float32), np.zeros(1, np.int32), np.zeros(0, np.int32)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftBatches:
    """Deals rows to ranks and micro-batches, balanced by tokens."""

    rows: RowFiles
    batch_size: int  # of all ranks
    layout: BatchLayout
    rank: int
    world_size: int

    def in_order(self, order: PromptOrder, step: int) -> TrainBatch:
        """The batch of a step (from 0). Passes follow each other without a gap: a batch may have
        the last rows of one and the first of the next. `order` needs no cursor, so a resumed run
        continues with the batch that it would have had."""
        first = step * self.batch_size
        found = [order.at(idx) for idx in range(first, first + self.batch_size)]
        return self._batch([row for _, row in found], [f"e{epoch}/{row}/0" for epoch, row in found])

    def once(self) -> Iterator[TrainBatch]:
        """All rows, in the order of the file; the last batch may be smaller."""
        for first in range(0, len(self.rows), self.batch_size):
            members = range(first, min(first + self.batch_size, len(self.rows)))
            yield self._batch(members, [f"eval/{row}/0" for row in members])

    def _batch(self, members: Sequence[int], sample_ids: Sequence[str]) -> TrainBatch:
        """`metrics` has the numbers of learned and of all tokens of the batch."""
        masks = [self.rows.mask[self.rows.span(row)] for row in members]
        lens = [len(mask) for mask in masks]
        prompt_lens = [int(np.argmax(mask)) for mask in masks]  # up to the first learned token
        shapes = [GroupShape(p, [n - p]) for n, p in zip(lens, prompt_lens, strict=True)]
        plan = plan_batch(
            shapes,
            self.world_size,
            num_micro_batches=self.layout.num_micro_batches,
            max_tokens_per_micro_batch=self.layout.max_tokens_per_micro_batch,
        )[self.rank]
        num_learned = sum(int(mask.sum()) for mask in masks)
        offsets = np.cumsum([0, *(lens[idx] for idx in plan.samples)]).astype(np.int32)
        tokens, mask = np.zeros(offsets[-1], np.int32), np.zeros(offsets[-1], np.uint8)
        for start, stop, idx in zip(offsets, offsets[1:], plan.samples, strict=False):
            tokens[start:stop] = self.rows.tokens[self.rows.span(members[idx])]
            mask[start:stop] = masks[idx]
        return TrainBatch(
            tokens=tokens,
            offsets=offsets,
            prompt_lens=np.asarray([prompt_lens[idx] for idx in plan.samples], np.int32),
            mask=mask,
            versions=np.zeros(len(tokens), np.int64),
            columns={},
            groups=_NO_GROUPS,
            sample_ids=[sample_ids[idx] for idx in plan.samples],
            mini_batches=[MiniBatch(plan.micro_batches, num_learned, len(members))],
            metrics={"tokens": float(num_learned), "all_tokens": float(sum(lens))},
        )
