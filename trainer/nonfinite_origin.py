"""Names the origin of a gradient that is not finite, by scoring the step's samples again.

M: generated tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from umbra.trainer.data.train_batch import TrainBatch
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.optimizer import local_shard
from umbra.trainer.model.train_model import TokenScores, TrainModel
from umbra.trainer.objective import Objective
from umbra.trainer.world.mesh import from_each_rank


def nonfinite_origin(
    model: TrainModel,
    batch: TrainBatch,
    mini_batch: Sequence[MicroBatch],
    objective: Objective,
    scored: str,
) -> str:
    """Names the first sample whose scores, `scored` in words, or loss are not finite or, if all
    are, the first such gradient in backward order. Needs the parameters and gradients of the step.
    Collective; returns the same on every rank."""
    found: list[tuple[int, int, str]] = []  # in the order of micro-batches, then of gradients
    with model.recorded_calls() as calls:
        for idx, micro_batch in enumerate(mini_batch):
            scores = model.measure(micro_batch, objective.entropy_use)
            faults = _faults(batch, micro_batch, scores, objective, scored)
            found += ((idx, place, fault) for place, fault in faults)
    gradients = _nonfinite_gradients(model, calls, scored)
    found += ((len(mini_batch), place, fault) for place, fault in gradients)
    firsts = [first for of_rank in from_each_rank(found[:1]) for first in of_rank]
    return min(firsts)[-1] if firsts else "every gradient is finite, but their norm overflows"


def _faults(
    batch: TrainBatch,
    micro_batch: MicroBatch,
    scores: TokenScores,
    objective: Objective,
    scored: str,
) -> Generator[tuple[int, str]]:
    """The index of each sample of the micro-batch that has a fault, and a sentence about it. As in
    a step, the loss is computed once: it may count its calls, or compare ranks."""
    logprobs = scores.logprobs.requires_grad_()
    with torch.enable_grad():
        loss = objective(TokenScores(logprobs, scores.entropy), micro_batch).loss
    values = {scored: logprobs.detach(), **micro_batch.columns}
    if scores.entropy is not None:
        values["entropies"] = scores.entropy
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, logprobs, materialize_grads=True)
        values["gradients of the loss"] = gradient
    samples = np.searchsorted(batch.offsets, micro_batch.places, side="right") - 1  # [M]
    starts: list[int] = np.flatnonzero(np.diff(samples, prepend=-1)).tolist()
    for idx, (start, stop) in enumerate(pairwise([*starts, len(samples)])):
        for name, of_tokens in values.items():
            if not of_tokens[start:stop].isfinite().all():
                sample_id = batch.sample_ids[int(samples[start])]
                prompt = sample_id.partition("/")[2].rpartition("/")[0]
                fault = f"{name} that are not finite"
                yield idx, f"sample {sample_id} (prompt {prompt}) is the first with {fault}"
                break


def _nonfinite_gradients(
    model: TrainModel, calls: Mapping[str, int], scored: str
) -> Generator[tuple[int, str]]:
    """Looks at this rank's shards. `calls` orders the modules; the scoring of tokens uses the head,
    last, without a call."""
    parameters = model.parameters
    module_order = {name: calls.get(name.rpartition(".")[0], len(calls)) for name in parameters}
    for place, name in enumerate(sorted(parameters, key=module_order.__getitem__, reverse=True)):
        gradient = parameters[name].grad
        if gradient is not None and not local_shard(gradient).isfinite().all():
            fault = f"{name} is the first parameter, in backward order, whose gradient is not"
            yield place, f"all {scored} and losses are finite, and {fault}"
