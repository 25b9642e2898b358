"""Computes the expected results of a run without it: every prompt, token, reward and logprob.

Each token of the echo engine follows from the seed and all tokens before it. Its logprob, with
`weights_in_logprobs`, follows from the weights, too. The bytes of each version therefore determine
the logprob that a token must have if that version made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from chaos_plan import MAX_NEW_TOKENS, STOP_TOKEN, VOCAB_SIZE, ChaosPlan

from umbra.engines.echo.echo_engine import EchoTokens, echo_logprobs, weights_fingerprint
from umbra.runtime.rollout.manager.admission import PromptOrder, trajectory_seed

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_SHAPES: Final = {"embed": (64, 1024), "up": (700, 1024), "norm": (7,), "down": (300, 511)}
"""4 MB in several buckets, some of them shared; no size fills a bucket exactly."""
_PROMPT_LENS: Final = (3, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The expected result of one trajectory.

    Attributes:
        prompt, tokens: [P] and [C].
        keys: [C] what the tokens' logprobs follow from, besides the weights.
        reward: the sum of the completion's tokens, see `chaos_reward`.
    """

    group_id: str
    prompt: Int32Array
    tokens: Int32Array
    keys: npt.NDArray[np.uint64]
    finish_reason: str
    reward: float


class Oracle:
    """Computes the expected results of a plan."""

    def __init__(self, plan: ChaosPlan) -> None:
        self._plan = plan
        self._order = PromptOrder(plan.num_prompts, plan.seed)
        self.versions = plan.versions()
        self._fingerprints: dict[int, int] = {}

    # -- data ----------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> list[Int32Array]:
        rng = np.random.default_rng([self._plan.seed, 1])
        return [
            rng.integers(0, VOCAB_SIZE, rng.integers(*_PROMPT_LENS)).astype(np.int32)
            for _ in range(self._plan.num_prompts)
        ]

    def batch(self, step: int) -> dict[str, Sample]:
        """The samples of a batch by id: groups are delivered in the data's order."""
        first = step * self._plan.groups_per_batch
        samples: dict[str, Sample] = {}
        for order_idx in range(first, first + self._plan.groups_per_batch):
            epoch, idx = self._order.at(order_idx)
            group_id = f"e{epoch}/{prompt_id(idx)}"
            for member in range(self._plan.group_size):
                seed = trajectory_seed(self._plan.seed, epoch, idx, member)
                samples[f"{group_id}/{member}"] = self._sample(group_id, seed, self.prompts[idx])
        return samples

    def _sample(self, group_id: str, seed: int, prompt: Int32Array) -> Sample:
        whole = EchoTokens(seed, prompt, vocab_size=VOCAB_SIZE)
        tokens, keys = whole.draw(MAX_NEW_TOKENS, [STOP_TOKEN])
        return Sample(
            group_id=group_id,
            prompt=prompt,
            tokens=tokens,
            keys=keys,
            finish_reason="stop" if tokens[-1] == STOP_TOKEN else "length",
            reward=float(tokens.sum()),
        )

    # -- weights -------------------------------------------------------------------------

    def step_of(self, version: int) -> int | None:
        """Optimizer steps in the weights of a version; None if there was no such version."""
        return self.versions.index(version) if version in self.versions else None

    def weights(self, version: int) -> dict[str, Float32Array]:
        """The tensors of a version, in the order of their manifest."""
        rng = np.random.default_rng([self._plan.seed, 2, version])
        return {name: rng.random(shape, np.float32) for name, shape in _SHAPES.items()}

    def logprobs(self, version: int, keys: npt.NDArray[np.uint64]) -> Float32Array:
        """The logprobs of tokens with these keys if made under that version."""
        if version not in self._fingerprints:
            tensors: list[Any] = [tensor.data for tensor in self.weights(version).values()]
            self._fingerprints[version] = weights_fingerprint(tensors)
        return echo_logprobs(keys, self._fingerprints[version])


def prompt_id(idx: int) -> str:
    return f"p{idx}"
