"""What a run must give, worked out without it: every prompt, token, reward and logprob.

The echo engine's tokens are a function of seed and position; its logprobs, with
`weights_in_logprobs`, of the weights too. So each version's bytes tell what a token's logprob has
to be if that version made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from chaos_plan import MAX_NEW_TOKENS, STOP_TOKEN, VOCAB_SIZE, ChaosPlan

from umbra.engines.echo import echo_logprobs, echo_tokens
from umbra.engines.echo_weights import weights_fingerprint
from umbra.runtime.rollout.order import PromptOrder, trajectory_seed

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_SHAPES: Final = {"embed": (64, 1024), "up": (700, 1024), "norm": (7,), "down": (300, 511)}
"""4 MB in several buckets, some of them shared; sizes that fill none."""
_PROMPT_LENS: Final = (3, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What has to come back for one trajectory.

    Attributes:
        prompt, tokens: [P] and [C].
        reward: the sum of the completion's tokens, see `chaos_reward`.
    """

    group_id: str
    seed: int
    prompt: Int32Array
    tokens: Int32Array
    finish_reason: str
    reward: float


class Oracle:
    """Knows the run of a plan."""

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
        """The samples of a batch by their ids: groups are handed out in the data's order."""
        first = step * self._plan.groups_per_batch
        samples: dict[str, Sample] = {}
        for place in range(first, first + self._plan.groups_per_batch):
            epoch, idx = self._order.at(place)
            group_id = f"e{epoch}/{prompt_id(idx)}"
            for member in range(self._plan.group_size):
                seed = trajectory_seed(self._plan.seed, epoch, idx, member)
                samples[f"{group_id}/{member}"] = self._sample(group_id, seed, self.prompts[idx])
        return samples

    def _sample(self, group_id: str, seed: int, prompt: Int32Array) -> Sample:
        tokens = echo_tokens(seed, np.arange(MAX_NEW_TOKENS), VOCAB_SIZE)
        stops = np.flatnonzero(tokens == STOP_TOKEN)
        if len(stops):
            tokens = tokens[: stops[0] + 1]
        return Sample(
            group_id=group_id,
            seed=seed,
            prompt=prompt,
            tokens=tokens,
            finish_reason="stop" if len(stops) else "length",
            reward=float(tokens.sum()),
        )

    # -- weights -------------------------------------------------------------------------

    def step_of(self, version: int) -> int | None:
        """Optimizer steps in the weights of a version; None for one that never was."""
        return self.versions.index(version) if version in self.versions else None

    def weights(self, version: int) -> dict[str, Float32Array]:
        """The tensors of a version, in the order of their manifest."""
        rng = np.random.default_rng([self._plan.seed, 2, version])
        return {name: rng.random(shape, np.float32) for name, shape in _SHAPES.items()}

    def logprobs(self, version: int, seed: int, positions: npt.NDArray[np.int64]) -> Float32Array:
        """Of the tokens at `positions`, had they been made under that version."""
        if version not in self._fingerprints:
            tensors: list[Any] = [tensor.data for tensor in self.weights(version).values()]
            self._fingerprints[version] = weights_fingerprint(tensors)
        return echo_logprobs(self._fingerprints[version], seed, positions)


def prompt_id(idx: int) -> str:
    return f"p{idx}"
