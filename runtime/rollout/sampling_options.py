from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the tokens of a generation are sampled, and what ends it; the same for all
    turns of a sample."""

    temperature: float  # 0 is greedy
    top_p: float = 1.0  # 1: all tokens
    top_k: int = 0  # 0: all tokens
    stop_token_ids: Sequence[int] = ()  # a generation ends after any of these

    def request_fields(self) -> dict[str, Any]:
        """The request's fields, without top-p and top-k where they are not used."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "stop_token_ids": self.stop_token_ids,
        }
        if self.temperature and self.top_p < 1:
            fields["top_p"] = self.top_p
        if self.temperature and self.top_k:
            fields["top_k"] = self.top_k
        return fields
