from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from umbra.engines.shell.adapter_settings import EngineSettings
from umbra.engines.shell.engine_core import NewOutput, PolledCore, WeightUpdates
from umbra.engines.shell.engine_shell import EngineShell
from umbra.engines.shell.polled_requests import PolledRequests
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.errors import ConfigError, WeightSyncError
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.links.image_source import ImageSource
from umbra.runtime.weights.manifest import BucketGrid, Extent, Manifest

_MAX_BURST: Final = 1024
# Tokens of one request made at once where no speed is set: a long one still takes several batches.
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads positions
_MASK: Final = (1 << 64) - 1
_OPEN_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSettings(EngineSettings):
    """Settings of an echo engine. Those about a model and its memory are ignored.

    Attributes:
        vocab_size: tokens are below it; a prompt with others is refused.
        tokens_per_s: speed of each running request; None: as fast as possible.
        verify_checksums: check what a sync delivers (imports torch).
        weights_in_logprobs: keep the bytes that syncs deliver, and derive every logprob from
            them, the token and its context (`echo_logprobs`); otherwise it is 0. A test that knows
            each version's bytes can prove which weights made a token, whatever its label.
    """

    model_path: str = ""
    max_context_len: int = 4096
    vocab_size: int = 256
    tokens_per_s: float | None = None
    verify_checksums: bool = False
    weights_in_logprobs: bool = False

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        is_slow = self.tokens_per_s is not None and self.tokens_per_s <= 0
        if self.vocab_size < 1 or is_slow:
            raise ConfigError(
                f"vocab_size={self.vocab_size} and tokens_per_s={self.tokens_per_s} must be above 0"
            )


class EchoCore(PolledCore):
    """Makes tokens when they are taken, as many as time and `tokens_per_s` of each request allow. A
    level 2 sleep loses `weights`; with `weights_in_logprobs`, logprobs depend on them."""

    name = "echo"
    takes_forced = True
    keeps_requests_asleep = True

    def __init__(self, settings: EchoSettings, weights: EchoWeights | None) -> None:
        super().__init__()
        self._tokens_per_s = settings.tokens_per_s
        self._max_num_seqs = settings.max_num_seqs
        self._weights_in_logprobs = settings.weights_in_logprobs
        self._weights = weights
        self._live: dict[str, _EchoOutput] = {}  # in order of arrival
        self._num_running = 0
        self.vocab_size = settings.vocab_size

    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> _EchoOutput:
        self._live[key] = output = _EchoOutput(self, key, request)
        self._start_waiting()
        return output

    async def abort(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self._live:
                self._live[key].is_aborted = True
                self.remove(key)

    def remove(self, key: str) -> None:
        if self._live.pop(key).since is not None:
            self._num_running -= 1
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._num_running < min(self._max_num_seqs, len(self._live)):
            for output in islice(self._live.values(), self._max_num_seqs):
                if output.since is None:
                    output.since = asyncio.get_running_loop().time()
                    self._num_running += 1
            self.hurry()

    def hurry(self) -> None:
        """Takes tokens before the tick if no speed is set."""
        if self._tokens_per_s is None:
            self.ended.set()

    def allowance(self, output: _EchoOutput) -> int:
        """Tokens that a request may have had since the last take."""
        if self.is_paused or output.since is None:
            return 0
        if self._tokens_per_s is None:
            return _MAX_BURST
        now = asyncio.get_running_loop().time()
        count = int((now - output.since) * self._tokens_per_s)
        output.since += count / self._tokens_per_s
        return count

    def logprobs(self, keys: Any) -> list[float]:
        if not self._weights_in_logprobs or self._weights is None:
            return [0.0] * len(keys)
        return echo_logprobs(keys, self._weights.fingerprint()).tolist()

    async def pause(self, *, keep: bool) -> None:
        self.is_paused = True
        if not keep:
            await self.abort(list(self._live))

    async def resume(self) -> None:
        self.is_paused = False
        now = asyncio.get_running_loop().time()
        for output in self._live.values():
            if output.since is not None:
                output.since = now
        self.hurry()

    async def sleep(self, level: int, tags: Sequence[str]) -> None:
        if level == 2 and "weights" in tags and self._weights is not None:
            self._weights.clear()


class EchoEngine(EngineShell[EchoCore]):
    """An engine without a model: the whole protocol, made-up tokens, no torch.

    It serves tests, benchmarks and trials of a cluster. Each token depends on the trajectory's
    seed, its position and all tokens before it (`EchoTokens`), so a trajectory that was cut
    resumes exactly, on any engine, and differs if it is resumed from another context. The
    settings are those of `EchoSettings`, by name.
    """

    __signature__ = inspect.signature(EchoSettings)

    def __init__(self, **settings: Any) -> None:
        made = EchoSettings(**settings)
        self._held = EchoWeights()
        kept = self._held if made.verify_checksums or made.weights_in_logprobs else None
        core = EchoCore(made, kept)
        super().__init__(
            core,
            PolledRequests(core, max_num_seqs=made.max_num_seqs, tick_ms=made.tick_ms),
            EchoUpdates(kept, verify=made.verify_checksums),
            max_context_len=made.max_context_len,
            load_weights=made.load_weights,
        )

    def weights_fingerprint(self) -> int:
        """A number for the bytes that the engine holds; without weights, for no bytes."""
        return self._held.fingerprint()


class _EchoOutput:
    """A request in progress; `since` is the loop time of its last token, None while
    it waits to run."""

    def __init__(self, core: EchoCore, key: str, request: GenerationRequest) -> None:
        self._core = core
        self._key = key
        self._request = request
        self._tokens = EchoTokens(
            request.seed, request.tokens, vocab_size=core.vocab_size, position=request.position
        )
        self.since: float | None = None
        self.is_aborted = False
        self.changed = asyncio.Event()

    def take(self) -> NewOutput | None:
        if self.is_aborted:
            return NewOutput(tokens=[], logprobs=[], finish_reason="abort")
        request = self._request
        done = self._tokens.position - request.position
        left = request.max_new_tokens - done
        count = min(self._core.allowance(self), left)
        if count == 0:
            return None
        drawn = self._tokens.draw(
            count, request.stop_token_ids, request.forced[done : done + count].tolist()
        )
        tokens: list[int] = drawn.tokens.tolist()
        reason = None
        if tokens[-1] in request.stop_token_ids:
            reason = "stop"
        elif len(tokens) == left:
            reason = "length"
        if reason is None:
            self._core.hurry()
        else:
            self._core.remove(self._key)
        return NewOutput(
            tokens=tokens, logprobs=self._core.logprobs(drawn.keys), finish_reason=reason
        )


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

    def draw(
        self, count: int, stop_token_ids: Collection[int] = (), forced: Sequence[int] = ()
    ) -> Drawn:
        """The next `count` tokens, or as many `forced` ones."""
        tokens: list[int] = []
        keys: list[int] = []
        state = self._digest.intdigest()
        for position in range(self.position, self.position + count):
            token = (state + position * _GOLDEN & _MASK) * self._vocab_size >> 64
            if forced:
                token = forced[len(tokens)]
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


def weights_fingerprint(tensors: Iterable[bytes | bytearray | memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for data in tensors:
        digest.update(data)
    return digest.intdigest()


class EchoWeights:
    """The bytes that an engine holds. Updates overwrite them in place, even an aborted one."""

    def __init__(self) -> None:
        self.image = bytearray()
        self._extents: Sequence[Extent] = ()
        self._fingerprint: int | None = None

    def lay_out(self, extents: Sequence[Extent], nbytes: int) -> None:
        """Bytes stay as they are if the layout has not changed."""
        if (len(self.image), list(self._extents)) != (nbytes, list(extents)):
            self.image = bytearray(nbytes)
        self._extents = extents
        self._fingerprint = None

    def write(self, start: int, data: memoryview) -> None:
        self.image[start : start + len(data)] = data
        self._fingerprint = None

    def fingerprint(self) -> int:
        """Before the first update, the fingerprint of no bytes."""
        if self._fingerprint is None:
            image = memoryview(self.image)
            self._fingerprint = weights_fingerprint(
                image[extent.offset : extent.offset + extent.nbytes] for extent in self._extents
            )
        return self._fingerprint

    def clear(self) -> None:
        self.lay_out((), 0)


class EchoUpdates(WeightUpdates):
    """Reads every byte of a sync, into `weights` if given. `verify` compares
    checksums with torch."""

    def __init__(self, weights: EchoWeights | None, *, verify: bool) -> None:
        self._weights = weights
        self._verify = verify
        self._image = KeptImage()
        self._source: ImageSource | None = None

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return "the echo engine has no GPU"

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        layout = Manifest.from_wire(manifest)
        self._nbytes = layout.nbytes
        self._extents = [Extent(key, e.offset, e.nbytes) for key, e in enumerate(layout.entries)]
        self._plan = BucketGrid(layout.nbytes, buckets["bucket_nbytes"]).cut(self._extents)
        self._source = await asyncio.to_thread(
            ImageSource, self._image, layout.nbytes, buckets, _OPEN_TIMEOUT_S
        )

    async def load(self) -> int:
        return await asyncio.to_thread(self._load)

    def _load(self) -> int:
        nbytes, source = 0, self._open_source()
        if self._weights is not None:
            self._weights.lay_out(self._extents, self._nbytes)
        for idx, window in source.buckets():
            if self._weights is not None:
                with memoryview(source.memory) as image:
                    self._weights.write(window.start, image[window])
            nbytes += sum(piece.nbytes for piece in self._plan[idx])
            source.end_of_sync.set_loaded(idx + 1)
        return nbytes

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        if not self._verify or self._weights is None:
            return []
        return _mismatches(self._weights.image, regions)

    def stop(self) -> None:
        if self._source is not None:
            self._source.close()

    async def end(self) -> None:
        self.stop()
        self._source = None

    async def abort(self) -> None:
        await self.end()

    async def release(self) -> None:
        await self.end()
        self._image.close()

    async def close(self) -> None:
        await self.release()

    def _open_source(self) -> ImageSource:
        if self._source is None:
            raise WeightSyncError("no update is in progress; prepare_update comes first")
        return self._source


def _mismatches(image: bytearray, regions: Sequence[Sequence[int | None]]) -> list[str]:
    import torch

    from umbra.runtime.weights.checksum import checksum_of

    data = torch.frombuffer(image, dtype=torch.uint8)
    found: list[str] = []
    for offset, nbytes, checksum in regions:
        if offset is None or nbytes is None or checksum is None:
            continue
        arrived = checksum_of(data[offset : offset + nbytes])
        if arrived != checksum:
            found.append(
                f"bytes [{offset}, {offset + nbytes}): sent {checksum:#018x}, "
                f"arrived {arrived:#018x}"
            )
    return found
