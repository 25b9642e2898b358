"""A sample as text, for people: its prompt, and its completion by turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from umbra.runtime.rollout.agents.loop_history import TurnRecord
from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """Consecutive tokens of a completion that the policy generated, or that were all given.

    Attributes:
        start, stop: its tokens in the completion.
        versions: of the weights that generated it, in order; empty for given tokens.
        finish_reason: of an agent loop's generation; "" for others.
    """

    start: int
    stop: int
    versions: tuple[int, ...]
    text: str
    finish_reason: str

    @property
    def is_given(self) -> bool:
        return not self.versions


@dataclass(frozen=True, slots=True)
class SampleText:
    """Text of a sample, special tokens included."""

    prompt: str
    turns: tuple[TurnText, ...]

    @classmethod
    def decode(
        cls,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        completion: Sequence[int],
        segments: Sequence[Segment],
        records: Sequence[TurnRecord] = (),
    ) -> SampleText:
        """Decodes all tokens as one text, and cuts that where the turns begin.

        A character whose bytes lie on both sides of a cut belongs to the later turn. Decoding each
        turn alone would damage it, and some tokenizers drop the space at the start of a text.

        Args:
            records: an agent loop's generations, each a turn of its own. Without them, generations
                that follow each other directly are one turn.
        """
        tokens = [*prompt, *completion]
        reasons = {record.stop: record.reason for record in records}
        turns = _turns(segments, reasons.keys())
        whole = decode(tokens)
        cuts = [
            _common_len(decode(tokens[: len(prompt) + first.start]), whole) for first, *_ in turns
        ]
        return cls(
            whole[: cuts[0]] if cuts else whole,
            tuple(
                TurnText(
                    start=parts[0].start,
                    stop=parts[-1].stop,
                    versions=tuple(p.version for p in parts if p.version != NOT_GENERATED),
                    text=whole[begin:end],
                    finish_reason=reasons.get(parts[-1].stop, ""),
                )
                for parts, begin, end in zip(turns, cuts, [*cuts, len(whole)][1:], strict=True)
            ),
        )


def _turns(segments: Sequence[Segment], ends: Set[int]) -> list[list[Segment]]:
    """The segments of each turn. A segment may hold several turns of one version."""
    turns: list[list[Segment]] = []
    for segment in segments:
        inner = sorted(end for end in ends if segment.start < end < segment.stop)
        for start, stop in pairwise([segment.start, *inner, segment.stop]):
            is_given = segment.version == NOT_GENERATED
            if not turns or (turns[-1][-1].version == NOT_GENERATED) != is_given or start in ends:
                turns.append([])
            turns[-1].append(Segment(start, stop, segment.version))
    return turns


def _common_len(text: str, whole: str) -> int:
    """The number of characters at the start that both texts share."""
    if whole.startswith(text):
        return len(text)
    return next(idx for idx, char in enumerate(text) if not whole.startswith(char, idx))
