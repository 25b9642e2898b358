"""Turns a rank's batch into tensors for the model.

N: samples of a micro-batch; M: their generated tokens; T: longest sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbra.trainer.algorithms.losses import Aggregation, token_weights
from umbra.trainer.data.train_batch import ADVANTAGES, MiniBatch, TrainBatch
from umbra.trainer.model.packing import PackedInputs, Sample, pack, packing_order


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedInputs:
    """Samples padded on the right; causal attention needs no mask for that."""

    token_ids: Tensor  # [N, T] int64
    predicting: Tensor  # [M] int64 positions in the flattened [N * T] that predict the M tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass. All vectors but `sample_lens` are [M], in the same order."""

    inputs: PackedInputs | PaddedInputs
    targets: Tensor  # int64, the generated tokens
    columns: dict[str, Tensor]  # float32: the batch's, and logprobs under further models
    weights: Tensor  # float32, share of each token in the loss of its mini-batch; 0 in padding
    sample_lens: Tensor  # [N] int64, tokens of each sample
    places: NDArray[np.int64]  # int64, index of each token in the rank's batch; empty in padding


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchBuilder:
    """Leaves out samples of advantage zero with `skips_neutral`. With umbra's losses, without a
    KL term and an entropy bonus, they add exactly nothing to the gradient; once most prompts are
    learned, they are the majority."""

    packed: bool  # for packed attention; otherwise samples are padded
    dtype: torch.dtype  # of attention masks: the model's compute dtype
    device: torch.device
    aggregation: Aggregation
    max_new_tokens: int
    skips_neutral: bool = False

    def build(self, batch: TrainBatch) -> list[list[MicroBatch]]:
        """The micro-batches of each mini-batch, in the batch's order."""
        is_trained = batch.has_any(batch.mask != 0)
        if self.skips_neutral:
            is_trained &= batch.has_any(batch.columns[ADVANTAGES] != 0)
        return [
            [
                self._build_one(batch, each, [idx for idx in members if is_trained[idx]])
                for members in each.micro_batches
            ]
            for each in batch.mini_batches
        ]

    def _build_one(
        self, batch: TrainBatch, mini_batch: MiniBatch, members: Sequence[int]
    ) -> MicroBatch:
        samples = [_sample(batch, idx) for idx in members]
        order = packing_order(samples)
        samples = [samples[idx] for idx in order]
        members = [members[idx] for idx in order]
        if not samples:
            return self._padding(batch.columns)
        lens = torch.tensor([len(sample.generated) for sample in samples])
        flat = np.concatenate(
            [batch.offsets[idx] + s.generated for idx, s in zip(members, samples, strict=True)]
        )
        weights = token_weights(
            lens,
            self.aggregation,
            num_tokens_global=mini_batch.num_tokens,
            num_samples_global=mini_batch.num_samples,
            max_new_tokens=self.max_new_tokens,
        )
        return MicroBatch(
            inputs=self._inputs(samples),
            targets=self._to_device(batch.tokens[flat].astype(np.int64)),
            columns={name: self._to_device(all_[flat]) for name, all_ in batch.columns.items()},
            weights=weights.to(self.device),
            sample_lens=lens.to(self.device),
            places=flat,
        )

    def _padding(self, names: Iterable[str]) -> MicroBatch:
        """Tokens of weight zero, with which this rank takes part in the others' collectives. The
        fewest whose passes have more than one row, for which torch would compile other code."""
        nothing = Sample(tokens=np.zeros(3, np.int32), prompt_len=1, generated=np.arange(1, 3))
        zeros = torch.zeros(2, device=self.device)
        return MicroBatch(
            inputs=self._inputs([nothing]),
            targets=torch.zeros(2, dtype=torch.int64, device=self.device),
            columns=dict.fromkeys(names, zeros),
            weights=zeros,
            sample_lens=torch.full((1,), 2, dtype=torch.int64, device=self.device),
            places=np.zeros(0, np.int64),
        )

    def _inputs(self, samples: Sequence[Sample]) -> PackedInputs | PaddedInputs:
        if self.packed:
            return pack(samples, self.dtype, self.device)
        return _pad(samples, self.device)

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.as_tensor(values, device=self.device)


def _sample(batch: TrainBatch, idx: int) -> Sample:
    span = batch.span(idx)
    return Sample(
        tokens=batch.tokens[span],
        prompt_len=int(batch.prompt_lens[idx]),
        generated=np.flatnonzero(batch.mask[span]),
    )


def _pad(samples: Sequence[Sample], device: torch.device) -> PaddedInputs:
    longest = max(len(sample.tokens) for sample in samples) - 1  # the last predicts nothing
    token_ids = np.zeros((len(samples), longest), np.int64)
    predicting: list[NDArray[np.int64]] = []
    for idx, sample in enumerate(samples):
        inputs = sample.tokens[:-1]
        token_ids[idx, : len(inputs)] = inputs
        predicting.append(idx * longest + sample.generated - 1)
    return PaddedInputs(
        token_ids=torch.as_tensor(token_ids, device=device),
        predicting=torch.as_tensor(np.concatenate(predicting), device=device),
    )
