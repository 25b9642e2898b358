"""A sample of an evaluation as text, for the report and for loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbra.runtime.rollout.agents.sample_text import SampleText, TurnText
from umbra.runtime.rollout.dispatch.token_store import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSample:
    """The columns of the table that loggers show.

    Attributes:
        completion: all turns; where some were given, each begins with its source.
        num_tokens: of the whole completion.
    """

    prompt_id: str
    prompt: str
    completion: str
    reward: float
    num_tokens: int
    finish_reason: str

    @classmethod
    def decode(
        cls, decode: Callable[[Sequence[int]], str], sample: Mapping[str, Any]
    ) -> EvalSample:
        """From a sample of an evaluation's outcome, which may lack tokens at both ends."""
        prompt, tokens = sample["prompt_tokens"], sample["tokens"]
        segments = [Segment(*segment) for segment in sample["segments"]]
        text = SampleText.decode(decode, prompt, tokens, segments)
        num_before = sample["num_prompt_tokens"] - len(prompt)
        num_after = sample["num_tokens"] - len(tokens)
        return cls(
            prompt_id=sample["prompt_id"],
            prompt=f"[{num_before} tokens before]\n" * bool(num_before) + text.prompt,
            completion=_joined(text.turns) + f"\n[{num_after} tokens after]" * bool(num_after),
            reward=float(sample["reward"]),
            num_tokens=sample["num_tokens"],
            finish_reason=sample["finish_reason"],
        )


def _joined(turns: Sequence[TurnText]) -> str:
    if not any(turn.is_given for turn in turns):
        return "".join(turn.text for turn in turns)
    return "\n".join(f"[{'given' if turn.is_given else 'policy'}] {turn.text}" for turn in turns)
