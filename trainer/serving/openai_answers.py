from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from umbra.trainer.serving.choice import Step


class AnswerForm(ABC):
    """The format of one answer; constructed when the request arrives. `decode` returns the text of
    tokens, for logprobs."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, model: str, decode: Callable[[Sequence[int]], str], wants_logprobs: bool
    ) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._decode = decode
        self.wants_logprobs = wants_logprobs

    def whole(self, choices: Sequence[Step], usage: dict[str, int]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [
                {
                    "index": index,
                    **self._content(step),
                    "logprobs": self._logprobs(step),
                    "finish_reason": step.finish_reason,
                }
                for index, step in enumerate(choices)
            ],
            "usage": usage,
        }

    def chunk(self, index: int, step: Step) -> dict[str, Any]:
        """One step of one choice."""
        choice = {
            "index": index,
            **self._delta(step),
            "logprobs": self._logprobs(step) if step.tokens else None,
            "finish_reason": step.finish_reason or None,
        }
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, if the client asked for usage."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first step, if any."""
        del index
        return None

    @abstractmethod
    def _content(self, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _format_logprobs(self, texts: list[str], logprobs: list[float]) -> dict[str, Any]: ...

    def _logprobs(self, step: Step) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        return self._format_logprobs(
            [self._decode([token]) for token in step.tokens], step.logprobs
        )


class CompletionForm(AnswerForm):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _content(self, step: Step) -> dict[str, Any]:
        return {"text": step.text}

    _delta = _content

    def _format_logprobs(self, texts: list[str], logprobs: list[float]) -> dict[str, Any]:
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": None,
        }


class ChatForm(AnswerForm):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def _content(self, step: Step) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": step.text, "refusal": None}}

    def _delta(self, step: Step) -> dict[str, Any]:
        return {"delta": {"content": step.text} if step.text else {}}

    def _format_logprobs(self, texts: list[str], logprobs: list[float]) -> dict[str, Any]:
        content = [
            {
                "token": text,
                # Part of a character, whose bytes the text does not show.
                "bytes": None if "\ufffd" in text else list(text.encode()),
                "logprob": logprob,
                "top_logprobs": [],
            }
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
