"""Finds prompts that are trained on twice, or held out and trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import xxhash

_SHOWN_LEN: Final = 100
"""Characters of an example: enough for a question and the template behind it."""


@dataclass(slots=True)
class _Found:
    num_prompts: int = 0
    num_repeated: int = 0
    first: str = ""

    def count(self, prompt: dict[str, Any], is_repeated: bool) -> None:
        self.num_prompts += 1
        if is_repeated:
            self.num_repeated += 1
            self.first = self.first or _ending(prompt["prompt"])

    def __str__(self) -> str:
        return f"{self.num_repeated} of {self.num_prompts} prompts"


class RepeatedPrompts:
    """Compares prompts by their tokens. Training prompts have to pass before held-out ones."""

    def __init__(self) -> None:
        self._digests: set[int] = set()
        self._train = _Found()
        self._held_out = _Found()

    def pass_train(self, prompts: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the records of training prompts."""
        for prompt in prompts:
            digest = xxhash.xxh3_64_intdigest(prompt["tokens"])
            self._train.count(prompt, digest in self._digests)
            self._digests.add(digest)
            yield prompt

    def pass_held_out(self, prompts: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the records of held-out prompts."""
        for prompt in prompts:
            digest = xxhash.xxh3_64_intdigest(prompt["tokens"])
            self._held_out.count(prompt, digest in self._digests)
            yield prompt

    def warnings(self) -> list[str]:
        """A warning per data set, with the first example and the remedy."""
        found: list[str] = []
        if self._train.num_repeated:
            found.append(
                f"data.train: {self._train} repeat an earlier one, such as "
                f"{self._train.first!r}: they are trained on more often; remove them unless "
                "that is meant"
            )
        if self._held_out.num_repeated:
            found.append(
                f"data.eval: {self._held_out} are in data.train, too, such as "
                f"{self._held_out.first!r}: evaluations measure what was trained on; remove "
                "them from one of the two"
            )
        return found


def _ending(text: str) -> str:
    """The end of a prompt: chats begin alike."""
    return text if len(text) <= _SHOWN_LEN else f"...{text[-_SHOWN_LEN:]}"
