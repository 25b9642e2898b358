"""One choice of an answer: a generation as text, with stop texts."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from umbra.runtime.rollout.dispatch.generator import GeneratedPiece, GenerationOptions, Generator

_REPLACEMENT: Final = "\ufffd"  # decoders return it for bytes that are not (yet) a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The settings with which a choice is sampled."""

    options: GenerationOptions  # the text of its stop tokens is not part of the choice
    stops: Sequence[str]  # texts that end the choice and are not part of it

    def at(self, index: int) -> Sampling:
        """The settings for the choice at `index`: the first has the request's own seed."""
        seed = self.options.seed
        if seed is None or index == 0:
            return self
        digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
        return replace(self, options=replace(self.options, seed=int.from_bytes(digest) >> 1))


class Step(NamedTuple):
    """The part of a choice that arrived since the previous step."""

    text: str
    tokens: list[int]  # all that were generated, also those of a stop token or stop text
    logprobs: list[float]
    finish_reason: str  # "stop" or "length" in the last step, else ""


async def generate_choice(
    generator: Generator,
    decode: Callable[[Sequence[int]], str],
    prompt: Sequence[int],
    sampling: Sampling,
) -> AsyncGenerator[Step, None]:
    """Yields steps as engines report tokens. Closing it withdraws the request.
    Raises as `Generator`."""
    writer = StepWriter(decode, sampling.stops)
    async with aclosing(generator.stream(prompt, sampling.options)) as pieces:
        async for piece in pieces:
            step = writer.write(piece)
            yield step
            if step.finish_reason:
                return


async def collect(steps: AsyncGenerator[Step, None]) -> Step:
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = ""
    async with aclosing(steps):
        async for step in steps:
            texts.append(step.text)
            tokens += step.tokens
            logprobs += step.logprobs
            reason = step.finish_reason
    return Step("".join(texts), tokens, logprobs, reason)


class StepWriter:
    """Turns a generation's pieces into steps."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._stream = TextStream(decode)
        self._scanner = StopScanner(stops)
        self._is_token_by_token = bool(stops)  # to find the token that completes a stop

    def write(self, piece: GeneratedPiece) -> Step:
        tokens: list[int] = piece.tokens.tolist()
        logprobs: list[float] = piece.logprobs.tolist()
        reason = piece.finish_reason
        shown = tokens[:-1] if reason == "stop" else tokens
        runs = [[token] for token in shown] if self._is_token_by_token else [shown]
        text = ""
        for num_tokens, run in enumerate(runs, 1):
            text += self._scanner.add(self._stream.add(run))
            if self._scanner.is_stopped:
                return Step(text, tokens[:num_tokens], logprobs[:num_tokens], "stop")
        if reason:
            text += self._scanner.add(self._stream.close())
            if self._scanner.is_stopped:
                reason = "stop"
            text += self._scanner.close()
        return Step(text, tokens, logprobs, reason)


class TextStream:
    """Decodes tokens piece by piece; the joined texts equal decoding all tokens at once.

    Each piece is decoded with the tokens of the piece before it, on which its text may depend (a
    leading space, for example), and held back while it ends in the middle of a character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # from the beginning of the last shown piece on
        self._num_shown = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text to show after these tokens; "" if they end within a character."""
        self._tokens += tokens
        return self._advance(may_hold=True)

    def close(self) -> str:
        """The remaining text: bytes that never became a character."""
        return self._advance(may_hold=False)

    def _advance(self, may_hold: bool) -> str:
        shown = self._decode(self._tokens[: self._num_shown])
        text = self._decode(self._tokens)
        if len(text) <= len(shown) or (may_hold and text.endswith(_REPLACEMENT)):
            return ""
        del self._tokens[: self._num_shown]
        self._num_shown = len(self._tokens)
        return text[len(shown) :]


class StopScanner:
    """Passes text through up to the first complete stop; holds back what may begin a stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """The text that is certain to come before any stop."""
        held = self._held + text
        found = [(start + len(s), start) for s in self._stops if (start := held.find(s)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = self._num_held(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def close(self) -> str:
        """Ends the text: what was held back is not a stop."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        return max((_num_begun(stop, text) for stop in self._stops), default=0)


def _num_begun(stop: str, text: str) -> int:
    """Length of the longest end of `text` that begins `stop`, and is not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
