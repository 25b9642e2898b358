"""Generation for any caller: the engines of one pool, without batches, groups or a ledger.

    caller ──stream()──▶ Generator ──▶ Dispatcher ──▶ engines
           ◀── pieces ──     ▲            │
                             └─ tokens ───┘

The death of an engine, a pause and a weight update only cost time: the generation resumes from
prompt + tokens so far.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.actor.actor_spec import ActorContext, actor_context, idempotent
from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import RolloutError, UmbraError, first_leaf
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.engine_fleet import Fleet
from umbra.runtime.rollout.dispatch.pool_load import PoolLoad
from umbra.runtime.rollout.dispatch.router import Router
from umbra.runtime.rollout.dispatch.token_store import Runs
from umbra.runtime.rollout.dispatch.trajectory import Trajectory, Turn
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import DispatchConfig, SamplingOptions
from umbra.runtime.settings import from_wire
from umbra.runtime.waiting import Alarm

logger = logging.getLogger(__name__)

_SEED_BITS: Final = 63
_NO_TOKENS: Final = np.empty(0, np.int32)
_NO_LOGPROBS: Final = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How one prompt is continued. Raises ValueError for a value out of range.

    Attributes:
        max_new_tokens: None for as many as the context allows.
        temperature: 0 is greedy.
        stop_token_ids: the generation ends after any of these and includes it.
        seed: gives the same tokens, as far as the engine's arithmetic does; None draws one.
        lora: name of the pool's adapter to generate with; "" for the model as it is.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    lora: str = ""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 1 << _SEED_BITS:
            raise ValueError(f"seed must lie in [0, 2**{_SEED_BITS}), got {self.seed}")


class GeneratedPiece(NamedTuple):
    """The part of a generation that arrived since the previous piece."""

    tokens: NDArray[np.int32]  # [n] int32
    logprobs: NDArray[np.float32]  # [n] float32, of the distribution sampled from
    finish_reason: str  # "stop" or "length" in the last piece, else ""


class Generator:
    """Owns the open requests of a pool. Runs on one loop; `run()` must run beside the callers."""

    def __init__(
        self, config: DispatchConfig, context: ActorContext, note: Callable[[str], None]
    ) -> None:
        self._config = config
        self._open: dict[int, _Generation] = {}
        self._uids = itertools.count()
        self._failure: UmbraError | None = None
        self._dispatcher = Dispatcher(
            Router(config.max_inflight_per_engine, config.max_running_per_engine),
            self._fail,
            _Deliveries(self._open),
        )
        self._fleet = Fleet(config, context, self._dispatcher, note)
        self._pool_load = PoolLoad(context.supervisor, config.pool)
        self._starving = Alarm(config.engine_timeout_s, self._on_starved)

    async def run(self) -> None:
        """Follows the pool until cancelled. If that fails, so do all generations."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._config.shares_memory:
                    tasks.create_task(self._pool_load.run())
                await self._fleet.run(self._watch)
        except* UmbraError as group:
            self._fail(RolloutError(f"lost track of the engines: {first_leaf(group)}"))
        finally:
            self._starving.watch(False)
        if self._failure is not None:
            raise self._failure

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_serving(self) -> bool:
        return self._fleet.is_serving

    @property
    def states(self) -> set[EngineState]:
        return {view.state for view in self._fleet.views}

    @property
    def max_context_len(self) -> int:
        return self._config.max_context_len

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def engines(self) -> dict[str, dict[str, Any]]:
        """By name and incarnation, such as `judge-0#1`: its "state" and open "requests"."""
        return {
            str(view.engine): {
                "state": str(view.state),
                "requests": self._dispatcher.num_inflight(view.engine),
            }
            for view in self._fleet.views
        }

    async def generate(
        self, tokens: Sequence[int] | NDArray[np.int32], options: GenerationOptions
    ) -> GeneratedPiece:
        pieces = list[GeneratedPiece]()
        async with aclosing(self.stream(tokens, options)) as whole:
            async for piece in whole:
                pieces.append(piece)
        return _joined(pieces)

    async def stream(
        self, tokens: Sequence[int] | NDArray[np.int32], options: GenerationOptions
    ) -> AsyncGenerator[GeneratedPiece, None]:
        """Continues `tokens` [T]; pieces come as engines report them.

        A caller that closes the stream or is cancelled withdraws its request.

        Raises:
            ValueError: the prompt fills the context.
            RequestRefused: a token is outside the vocabulary, or the pool lacks the adapter.
            RolloutError, EngineError: no engine served for too long, or all that tried failed.
        """
        generation = self._generation(_checked_prompt(tokens, self._config), options)
        async with aclosing(self._pieces(generation)) as pieces:
            async for piece in pieces:
                yield piece

    async def score(
        self, tokens: NDArray[np.int32], completion: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Logprobs [C] of the tokens of a `completion` of `tokens`, at temperature 1. Raises the
        errors of `stream`."""
        config = self._config
        if len(tokens) + len(completion) > config.max_context_len:
            raise ValueError(
                f"{len(tokens)} tokens and {len(completion)} of a completion exceed the context of "
                f"{config.max_context_len}"
            )
        forced = token_ids(completion, config.vocab_size, "completion")
        if not len(forced):
            return _NO_LOGPROBS
        options = GenerationOptions(max_new_tokens=len(forced), seed=0)
        generation = self._generation(_checked_prompt(tokens, config), options)
        generation.turn.forced = forced
        async with aclosing(self._pieces(generation)) as pieces:
            return _joined([piece async for piece in pieces]).logprobs

    async def _pieces(self, generation: _Generation) -> AsyncGenerator[GeneratedPiece, None]:
        if self._failure is not None:
            raise self._failure
        uid = generation.turn.trajectory.uid
        self._open[uid] = generation
        try:
            self._dispatcher.submit(generation.turn)
            self._watch()
            while True:
                piece = await generation.take()
                yield piece
                if piece.finish_reason:
                    return
        finally:
            del self._open[uid]
            if not generation.is_complete:
                self._dispatcher.cancel([generation.turn])
            self._watch()

    def _generation(self, prompt: NDArray[np.int32], options: GenerationOptions) -> _Generation:
        uid = next(self._uids)
        free_len = self._config.max_context_len - len(prompt)
        asked = options.max_new_tokens
        budget = free_len if asked is None else min(free_len, asked)
        name = f"generation {uid}"
        trajectory = Trajectory(
            name,
            Prompt(name, "", prompt, {}),
            secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
            budget=budget,
            max_context_len=self._config.max_context_len,
        )
        trajectory.uid = uid  # its tokens are delivered by this number
        sampling = SamplingOptions(
            temperature=options.temperature,
            stop_token_ids=[int(token) for token in options.stop_token_ids],
        )
        return _Generation(trajectory, budget, sampling, options.lora)

    def _watch(self) -> None:
        self._pool_load.observe(bool(self._open))
        self._starving.watch(bool(self._open) and not self._fleet.is_serving)

    def _on_starved(self) -> None:
        config = self._config
        error = RolloutError(
            f"no engine of pool {config.pool!r} has served for {config.engine_timeout_s:.3g} s "
            f"({self._fleet.describe()}): see the engines' logs"
        )
        for generation in self._open.values():
            generation.fail(error)

    def _fail(self, error: UmbraError) -> None:
        """Fails all generations, now and later."""
        self._failure = self._failure or error
        for generation in self._open.values():
            generation.fail(error)


class GeneratorService:
    """A `Generator` as an actor. It keeps no state: after its death callers ask again."""

    def __init__(self, config: dict[str, Any]) -> None:
        dispatch = from_wire(DispatchConfig, config)
        context = actor_context()
        self._operator_messages = OperatorMessages(context)
        self._generator = Generator(dispatch, context, self._operator_messages.put)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._operator_messages.run())
            tasks.create_task(self._generator.run())

    @idempotent
    async def generate(
        self, tokens: NDArray[np.int32], *options: Any, **named: Any
    ) -> dict[str, Any]:
        """{"tokens": int32 [n], "logprobs": float32 [n], "finish_reason"}; options are the fields
        of `GenerationOptions`, in their order or by name."""
        piece = await self._generator.generate(tokens, GenerationOptions(*options, **named))
        return piece._asdict()

    @idempotent
    async def score(
        self, tokens: NDArray[np.int32], completion: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        return await self._generator.score(tokens, completion)

    async def stream(
        self, tokens: NDArray[np.int32], *options: Any, **named: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Like `generate`, in pieces as they come; "finish_reason" is "" in all but the last."""
        pieces = self._generator.stream(tokens, GenerationOptions(*options, **named))
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece._asdict()

    @idempotent
    def stats(self) -> dict[str, Any]:
        return {"open": self._generator.num_open, "engines": self._generator.engines()}


class _Generation:
    """One generation: its turn, and the pieces that its caller has not read yet."""

    def __init__(
        self,
        trajectory: Trajectory,
        limit: int,
        sampling: SamplingOptions,
        lora: str,
    ) -> None:
        self.turn = Turn(
            trajectory=trajectory,
            group=None,
            start=0,
            limit=limit,
            sampling=sampling,
            on_end=lambda _turn, reason: self._end(reason),
            on_error=self.fail,
            lora=lora,
        )
        # Bounded by the token budget: a caller that reads slowly gets longer pieces.
        self._pieces: list[GeneratedPiece] = []
        self._changed = asyncio.Event()
        self._reason = ""
        self._error: UmbraError | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self._reason)

    def put(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        # Copied, because the arrays are views of a whole batch.
        self._pieces.append(GeneratedPiece(tokens.copy(), logprobs.copy(), ""))
        self._changed.set()

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._changed.set()

    def fail(self, error: UmbraError) -> None:
        self._error = self._error or error
        self._changed.set()

    async def take(self) -> GeneratedPiece:
        await self._changed.wait()
        self._changed.clear()
        pieces, self._pieces = self._pieces, []
        if self._error is not None and not self._reason:
            raise self._error
        return _joined([*pieces, GeneratedPiece(_NO_TOKENS, _NO_LOGPROBS, self._reason)])


class _Deliveries:
    """Passes tokens to the generations that wait for them."""

    def __init__(self, generations: dict[int, _Generation]) -> None:
        self._generations = generations

    def started(self, sample: Trajectory) -> None:
        pass

    def cut(self, sample: Trajectory) -> None:
        pass

    def on_tokens(self, runs: Runs) -> None:
        bounds: list[int] = runs.offsets.tolist()
        for uid, (start, stop) in zip(runs.uids.tolist(), itertools.pairwise(bounds), strict=True):
            self._generations[uid].put(runs.tokens[start:stop], runs.logprobs[start:stop])


def _joined(pieces: Sequence[GeneratedPiece]) -> GeneratedPiece:
    if len(pieces) == 1:
        return pieces[0]
    return GeneratedPiece(
        np.concatenate([piece.tokens for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        pieces[-1].finish_reason,
    )


def _checked_prompt(
    tokens: Sequence[int] | NDArray[np.int32], config: DispatchConfig
) -> NDArray[np.int32]:
    prompt = token_ids(tokens, config.vocab_size, "prompt")
    if prompt.size == 0:
        raise ValueError("the prompt is empty: expected at least one token id")
    if len(prompt) >= config.max_context_len:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room in the context of "
            f"{config.max_context_len}"
        )
    return prompt


class OperatorMessages:
    """Accepts lines for the operator at any time; `run()` sends them to the supervisor."""

    def __init__(self, context: ActorContext) -> None:
        self._supervisor = context.supervisor
        self._name = context.name
        # One line per lost engine, so the restart policy bounds the queue.
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def put(self, text: str) -> None:
        logger.info("%s", text)
        self._lines.put_nowait(text)

    async def run(self) -> None:
        while True:
            await self._send("note", await self._lines.get(), "note")

    async def record(self, text: str, kind: EventKind) -> None:
        """Writes an event to events.jsonl only; returns once the supervisor has it."""
        await self._send("record", text, kind)

    async def _send(self, method: str, text: str, kind: EventKind) -> None:
        try:
            await self._supervisor.call(method, text, kind, self._name, timeout_s=5.0)
        except UmbraError as error:
            logger.warning("the supervisor did not accept an operator message: %s", error)
