from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Drawn(NamedTuple):
    """N tokens, each with a key: a number that depends on the seed, the token's position, the token
    and all tokens before it."""

    tokens: npt.NDArray[np.int32]  # [N]
    keys: npt.NDArray[np.uint64]  # [N]


class EchoTokens:
    """Draws the tokens that follow a context (prompt and all tokens so far), in constant time each.
    A trajectory that was cut continues with the same tokens in any process if its seed, context and
    `position`, the completion index of the next token, are right."""

    def __init__(
        self,
        seed: int,
        context: Sequence[int] | npt.NDArray[np.int32],
        *,
        vocab_size: int,
        position: int = 0,
    ) -> None:
        self._digest = xxhash.xxh3_64(np.asarray(context, "<i4").tobytes(), seed=seed)
        self._vocab_size = vocab_size
        self.position = position

    def draw(self, count: int, stop_token_ids: Collection[int] = ()) -> Drawn:
        tokens: list[int] = []
        keys: list[int] = []
        state = self._digest.intdigest()
        for position in range(self.position, self.position + count):
            token = (state + position * _GOLDEN & _MASK) * self._vocab_size >> 64
            self._digest.update(token.to_bytes(4, "little"))
            state = self._digest.intdigest()
            tokens.append(token)
            keys.append(state + position * _GOLDEN & _MASK)
            if token in stop_token_ids:
                break
        self.position += len(tokens)
        return Drawn(np.array(tokens, np.int32), np.array(keys, np.uint64))


def echo_logprobs(keys: npt.NDArray[np.uint64], fingerprint: int) -> npt.NDArray[np.float32]:
    """Stand-ins for logprobs, below 0, from `Drawn` keys and the `weights_fingerprint`."""
    bits = keys ^ np.uint64(fingerprint)
    # 52 bits and a half: the largest value is still below 1 after rounding to float64.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.log(uniform).astype(np.float32)
