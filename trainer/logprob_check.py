"""Compares the engines' logprobs with the trainer's own: whether both compute the same model.

A sample is compared if the weights in training generated all of its tokens. After an update that
keeps the KV cache, later tokens of a sample depend on keys of older weights, too.

M: generated tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from umbra.runtime.errors import UmbraError
from umbra.runtime.settings import Dtype
from umbra.trainer.checkpoint.run_dir import VersionCounter
from umbra.trainer.data.train_batch import PROXIMAL_LOGPROBS, ROLLOUT_LOGPROBS, TrainBatch
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.world.mesh import first_text, max_over_ranks, sum_over_ranks

MAX_MEAN: Final[dict[Dtype, float]] = {"float64": 1e-5, "float32": 0.01, "bfloat16": 0.15}
"""Largest mean difference, in nats, if the config sets none; docs/engines.md has measured ones.
Lower bounds end runs whose numbers are merely rounded, higher ones miss faults."""
MAX_RATIO: Final = 30.0
"""How far the largest difference may be above the bound of the mean. Rounding alone reaches 10
times the mean; a fault of few tokens, such as a wrong row of the embeddings, is beyond this."""
_CAUSES: Final = (
    "Usual causes, the most frequent first: a head that only one side ties to the embeddings "
    "(tie_word_embeddings in config.json); rotary factors that depend on the length of a text "
    "(rope_scaling in config.json, pool.max_context_len); a tokenizer or chat template of another "
    "model; options in pool.engine_args that change the sampled distribution; quantised weights or "
    "KV cache"
)


_MEAN: Final = "train/logprob_difference_mean"
_LARGEST: Final = "train/logprob_difference_max"


class LogprobCheck:
    """Ends the run if the first comparable tokens differ too much; later it warns, once.
    Every rank has one.

    A resumed run begins with a check like a new one, because its engines are new. The check only
    warns if the last step compared before the resume, in `rows`, differed too much. `dtype` is the
    engines' and the trainer's, `max_mean` is `train.max_logprob_difference`, and the current one of
    `versions` is in training. `decode` is called only for the message of an error or a warning, and
    `warn` shows one to the operator.
    """

    def __init__(
        self,
        dtype: Dtype,
        max_mean: float,
        versions: VersionCounter,
        decode: Callable[[int], str],
        warn: Callable[[str], None],
        rows: Sequence[Mapping[str, float]] = (),
    ) -> None:
        self._max_mean = max_mean or MAX_MEAN[dtype]
        self._dtype = dtype
        self._versions = versions
        self._decode = decode
        self._warn = warn
        last = next((row for row in reversed(rows) if _MEAN in row), None)
        self._only_warns = last is not None and not self._is_within(last[_MEAN], last[_LARGEST])
        self._has_warned = False

    def run(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], step: int
    ) -> dict[str, float]:
        """Checks the batch of step `step` (from 0), whose micro-batches have the policy's logprobs
        as the proximal ones; returns metrics. Collective. Raises UmbraError on every rank if the
        first comparable tokens differ too much."""
        places, trainer = _gathered(micro_batches)
        is_comparable = batch.generated_by(self._versions.current)[places]
        is_comparable &= ~np.isnan(trainer)  # they make the gradient NaN, which has a message
        places, trainer = places[is_comparable], trainer[is_comparable]
        away = np.nan_to_num(np.abs(trainer - batch.columns[ROLLOUT_LOGPROBS][places]), nan=np.inf)
        total, count = sum_over_ranks(torch.tensor([away.sum(), len(away)], dtype=torch.float64))
        own_max = float(away.max(initial=0.0))
        largest = float(max_over_ranks(torch.tensor(own_max, dtype=torch.float64)))
        if not count:
            return {}
        mean = float(total / count)
        if self._is_within(mean, largest):
            self._only_warns = True
        elif not (self._only_warns and self._has_warned):
            worst = int(away.argmax()) if own_max == largest and len(away) else None
            where = "" if worst is None else self._describe(batch, places[worst], trainer[worst])
            self._report(step, mean, largest, first_text(where))
        return {_MEAN: mean, _LARGEST: largest}

    def _is_within(self, mean: float, largest: float) -> bool:
        return mean <= self._max_mean and largest <= self._max_mean * MAX_RATIO

    def _report(self, step: int, mean: float, largest: float, worst: str) -> None:
        found = (
            f"step {step + 1}: engines and trainer do not compute the same model. The logprobs of "
            f"the same tokens under the same weights differ by {mean:.3g} on average (allowed: "
            f"{self._max_mean:g} in {self._dtype}) and by {largest:.3g} at most (allowed: "
            f"{self._max_mean * MAX_RATIO:g}): {worst}."
        )
        remedy = (
            f"{_CAUSES}. If the difference is intended, set train.max_logprob_difference above "
            f"{max(mean, largest / MAX_RATIO):.2g}"
        )
        if not self._only_warns:
            raise UmbraError(f"{found} No weight has changed. {remedy}.")
        self._has_warned = True
        self._warn(f"warning: {found} This warning is not repeated. {remedy}.")

    def _describe(self, batch: TrainBatch, place: int, trainer: float) -> str:
        sample = int(np.searchsorted(batch.offsets, place, side="right")) - 1
        token_id = int(batch.tokens[place])
        engine = float(batch.columns[ROLLOUT_LOGPROBS][place])
        return (
            f"token {token_id} ({self._decode(token_id)!r}) at position "
            f"{place - int(batch.offsets[sample])} of sample {batch.sample_ids[sample]} has "
            f"{engine:.4g} by the engine and {float(trainer):.4g} by the trainer"
        )


def _gathered(
    micro_batches: Sequence[MicroBatch],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The index in the rank's batch, and the logprob, of each token that is not padding."""
    own = [each for each in micro_batches if len(each.places)]
    if not own:
        return np.zeros(0, np.int64), np.zeros(0, np.float64)
    logprobs = torch.cat([each.columns[PROXIMAL_LOGPROBS] for each in own]).double().cpu()
    return np.concatenate([each.places for each in own]), logprobs.numpy()
