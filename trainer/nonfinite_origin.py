"""Names the origin of a gradient that is not finite, by scoring the step's samples again.

M: generated tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from umbra.trainer.algorithms.base import LossOutput
from umbra.trainer.data.train_batch import TrainBatch
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.optimizer import local_shard
from umbra.trainer.model.token_scoring import EntropyUse
from umbra.trainer.model.train_model import TokenScores, TrainModel
from umbra.trainer.world.mesh import from_each_rank

Objective = Callable[[TokenScores, MicroBatch], LossOutput]


def nonfinite_origin(
    policy: TrainModel,
    batch: TrainBatch,
    mini_batch: Sequence[MicroBatch],
    objective: Objective,
    entropy_use: EntropyUse,
) -> str:
    """Names the first sample whose logprobs or loss are not finite or, if all are, the first such
    gradient in backward order. Needs the parameters and gradients of the step. Collective; returns
    the same on every rank."""
    found: list[tuple[int, int, str]] = []  # in the order of micro-batches, then of gradients
    with policy.recorded_calls() as calls:
        for idx, micro_batch in enumerate(mini_batch):
            scores = policy.measure(micro_batch, entropy_use)
            faults = _faults(batch, micro_batch, scores, objective)
            found += ((idx, place, fault) for place, fault in faults)
    gradients = _nonfinite_gradients(policy, calls)
    found += ((len(mini_batch), place, fault) for place, fault in gradients)
    firsts = [first for of_rank in from_each_rank(found[:1]) for first in of_rank]
    return min(firsts)[-1] if firsts else "every gradient is finite, but their norm overflows"


def _faults(
    batch: TrainBatch, micro_batch: MicroBatch, scores: TokenScores, objective: Objective
) -> Generator[tuple[int, str]]:
    """The index of each sample of the micro-batch that has a fault, and a sentence about it."""
    samples = np.searchsorted(batch.offsets, micro_batch.places, side="right") - 1  # [M]
    starts: list[int] = np.flatnonzero(np.diff(samples, prepend=-1)).tolist()
    for idx, (start, stop) in enumerate(pairwise([*starts, len(samples)])):
        tokens = slice(start, stop)
        sample = replace(
            micro_batch,
            targets=micro_batch.targets[tokens],
            columns={name: values[tokens] for name, values in micro_batch.columns.items()},
            weights=micro_batch.weights[tokens],
            sample_lens=micro_batch.sample_lens[idx : idx + 1],
            places=micro_batch.places[tokens],
        )
        entropy = None if scores.entropy is None else scores.entropy[tokens]
        fault = _fault(TokenScores(scores.logprobs[tokens], entropy), sample, objective)
        if fault:
            sample_id = batch.sample_ids[int(samples[start])]
            prompt = sample_id.split("/")[1]
            yield idx, f"sample {sample_id} (prompt {prompt}) is the first with {fault}"


def _fault(scores: TokenScores, sample: MicroBatch, objective: Objective) -> str:
    for name, values in {"logprobs": scores.logprobs, **sample.columns}.items():
        if not values.isfinite().all():
            return f"{name} that are not finite"
    logprobs = scores.logprobs.requires_grad_()
    with torch.enable_grad():
        loss = objective(TokenScores(logprobs, scores.entropy), sample).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    if loss.isfinite() and gradient.isfinite().all():
        return ""
    return f"a loss ({float(loss.detach()):g}) that is not finite, or whose gradient is not"


def _nonfinite_gradients(
    policy: TrainModel, calls: Mapping[str, int]
) -> Generator[tuple[int, str]]:
    """Looks at this rank's shards. `calls` orders the modules; the scoring of tokens uses the head,
    last, without a call."""
    parameters = policy.parameters
    module_order = {name: calls.get(name.rpartition(".")[0], len(calls)) for name in parameters}
    for place, name in enumerate(sorted(parameters, key=module_order.__getitem__, reverse=True)):
        gradient = parameters[name].grad
        if gradient is not None and not local_shard(gradient).isfinite().all():
            fault = f"{name} is the first parameter, in backward order, whose gradient is not"
            yield place, f"all logprobs and losses are finite, and {fault}"
