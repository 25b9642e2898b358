"""Turns a rank's columns, as the rollout manager delivers them, into tensors for the model.

N: samples of a micro-batch; M: their generated tokens; T: longest sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbra.runtime.errors import ProtocolError
from umbra.trainer.algorithms.advantage_estimators import batch_advantages
from umbra.trainer.algorithms.base import AdvantageEstimator
from umbra.trainer.algorithms.loss_aggregation import Aggregation, token_weights
from umbra.trainer.model.packing import PackedInputs, Sample, pack, packing_order


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedInputs:
    """Samples padded on the right; causal attention needs no mask for that.

    Attributes:
        token_ids: [N, T] int64.
        predicting: [M] int64 positions in the flattened [N * T] that predict the M tokens.
    """

    token_ids: Tensor
    predicting: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass. All vectors but the last are [M], in the same order.

    Attributes:
        targets: int64, the generated tokens.
        rollout_logprobs: float32, under the policy that sampled them in the rollouts.
        advantages: float32.
        weights: float32, share of each token in the global loss; 0 in padding.
        sample_lens: [N] int64, tokens of each sample, one sample after the other.
    """

    inputs: PackedInputs | PaddedInputs
    targets: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sample_lens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """This rank's samples of one step, and the counts of the whole batch.

    Attributes:
        tokens, logprobs, mask: [sum T], samples one after the other; `mask` is 1 where generated.
        offsets: [num_samples + 1].
        advantages: [num_samples].
        micro_batches: positions of samples; every rank has as many lists, empty ones are padding.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int32]
    prompt_lens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    micro_batches: Sequence[Sequence[int]]
    num_tokens_global: int
    num_samples_global: int
    metrics: Mapping[str, float]

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], estimate: AdvantageEstimator) -> RankBatch:
        """Makes the batch; advantages come from the rewards of the samples' groups.

        Raises:
            ProtocolError: a column is missing.
            UmbraError: the estimator's advantages cannot be used.
        """
        names = ("tokens", "offsets", "prompt_lens", "mask", "logprobs", "micro_batches", "metrics")
        try:
            own = {name: columns[name] for name in (*names, "num_samples_global")}
            num_tokens = columns["loss_tokens_global"]
            rewards, offsets = columns["group_rewards"], columns["group_offsets"]
            indices = columns["reward_indices"]
        except KeyError as error:
            raise ProtocolError(f"the rollout manager's batch lacks {error}") from None
        advantages = batch_advantages(estimate, rewards, offsets)[indices]
        return cls(**own, num_tokens_global=num_tokens, advantages=advantages)

    def sample(self, idx: int) -> Sample:
        start, stop = int(self.offsets[idx]), int(self.offsets[idx + 1])
        return Sample(
            tokens=self.tokens[start:stop],
            prompt_len=int(self.prompt_lens[idx]),
            generated=np.flatnonzero(self.mask[start:stop]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchBuilder:
    """Makes micro-batches; `token_weights` describes aggregation and max_new_tokens.

    Attributes:
        packed: whether to pack samples for packed attention; otherwise they are padded.
        dtype: of attention masks: the dtype the model computes in.
        skips_neutral: leave out samples of advantage zero. With umbra's losses and without a KL
            term they add exactly nothing to the gradient. Once most prompts are learned, they are
            the majority.
    """

    packed: bool
    dtype: torch.dtype
    device: torch.device
    aggregation: Aggregation
    max_new_tokens: int
    skips_neutral: bool = False

    def build(self, batch: RankBatch) -> list[MicroBatch]:
        """One per entry of `batch.micro_batches`, in its order."""
        return [self._build_one(batch, members) for members in batch.micro_batches]

    def _build_one(self, batch: RankBatch, members: Sequence[int]) -> MicroBatch:
        if self.skips_neutral:
            members = [idx for idx in members if batch.advantages[idx] != 0.0]
        samples = [batch.sample(idx) for idx in members]
        order = packing_order(samples)
        samples = [samples[idx] for idx in order]
        members = [members[idx] for idx in order]
        if not any(len(sample.generated) for sample in samples):
            return self._padding()
        lens = torch.tensor([len(sample.generated) for sample in samples])
        flat = np.concatenate(
            [batch.offsets[idx] + s.generated for idx, s in zip(members, samples, strict=True)]
        )
        advantages = np.repeat(batch.advantages[members], lens.numpy())
        weights = token_weights(
            lens,
            self.aggregation,
            num_tokens_global=batch.num_tokens_global,
            num_samples_global=batch.num_samples_global,
            max_new_tokens=self.max_new_tokens,
        )
        return MicroBatch(
            inputs=self._inputs(samples),
            targets=self._to_device(batch.tokens[flat].astype(np.int64)),
            rollout_logprobs=self._to_device(batch.logprobs[flat]),
            advantages=self._to_device(advantages),
            weights=weights.to(self.device),
            sample_lens=lens.to(self.device),
        )

    def _padding(self) -> MicroBatch:
        """Two tokens of weight zero, with which this rank takes part in the others' collectives."""
        nothing = Sample(tokens=np.zeros(2, np.int32), prompt_len=1, generated=np.ones(1, np.int64))
        zero = torch.zeros(1, device=self.device)
        return MicroBatch(
            inputs=self._inputs([nothing]),
            targets=torch.zeros(1, dtype=torch.int64, device=self.device),
            rollout_logprobs=zero,
            advantages=zero,
            weights=zero,
            sample_lens=torch.ones(1, dtype=torch.int64, device=self.device),
        )

    def _inputs(self, samples: Sequence[Sample]) -> PackedInputs | PaddedInputs:
        if self.packed:
            return pack(samples, self.dtype, self.device)
        return _pad(samples, self.device)

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.as_tensor(values, device=self.device)


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
