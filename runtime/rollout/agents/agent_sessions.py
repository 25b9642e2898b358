"""Agent loops in progress: maps a worker's `generate` to its trajectory, and replays generations.

A loop whose process died runs again from its beginning: the n-th `generate` with the recorded
context returns the recorded tokens at once. If a context differs, later tokens are discarded.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.errors import RolloutError, UmbraError
from umbra.runtime.rollout.agents.sample_text import LoopHistory, TurnRecord, once_key
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED, Group, Trajectory, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import SamplingOptions

_SEED_BITS: Final = 63


class _Session:
    __slots__ = (
        "answers", "group", "history", "num_returned", "sampling", "trajectory", "turn",
    )  # fmt: skip

    def __init__(
        self,
        trajectory: Trajectory,
        group: Group,
        sampling: SamplingOptions,
        history: LoopHistory,
    ) -> None:
        self.trajectory = trajectory
        self.group = group
        self.sampling = sampling
        self.history = history
        self.num_returned = 0  # turns that this run of the loop has received
        self.turn: Turn | None = None  # of the trajectory, in progress
        # By turns in progress: that of the trajectory and those with an adapter.
        self.answers: dict[Turn, asyncio.Future[dict[str, Any]]] = {}


class AgentSessions:
    """One session per run of a loop. A new run ends the session of the one before it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        recorder: Recorder,
        vocab_size: int = 0,
    ) -> None:
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._vocab_size = vocab_size  # 0: unknown
        self._sessions: dict[int, _Session] = {}
        self._by_trajectory: dict[Trajectory, int] = {}
        self._histories: dict[Trajectory, LoopHistory] = {}
        # Random, because a loop of an earlier manager must not hit a session of this one.
        self._ids = itertools.count(secrets.randbits(48))
        self.num_replayed_turns = 0
        self.num_diverged = 0

    def remember(self, trajectory: Trajectory, records: Mapping[str, Any]) -> None:
        history = self._histories[trajectory] = LoopHistory.of_records(records)
        # A restored checkpoint may have taken back the tokens of some turns.
        kept = [turn for turn in history.turns if turn.stop <= trajectory.completion_len]
        self._forget_turns(trajectory, history, len(kept))

    def open(self, trajectory: Trajectory, group: Group, sampling: SamplingOptions) -> int:
        self._end_run(trajectory)
        if trajectory.completion_len:
            trajectory.cut()
        self._recorder.cut(trajectory)
        history = self._histories.setdefault(trajectory, LoopHistory())
        session_id = next(self._ids)
        self._sessions[session_id] = _Session(trajectory, group, sampling, history)
        self._by_trajectory[trajectory] = session_id
        return session_id

    def close(self, trajectory: Trajectory) -> None:
        """Ends the trajectory's session, if any, and forgets its records."""
        self._end_run(trajectory)
        self._histories.pop(trajectory, None)

    def settle(self, trajectory: Trajectory) -> None:
        """Discards tokens that the loop never received; called when it has returned."""
        session = self._sessions.get(self._by_trajectory.get(trajectory, 0))
        if session is None:
            return
        self._end_turns(session)
        history = session.history
        seen = history.turns[session.num_returned - 1].stop if session.num_returned else 0
        if trajectory.completion_len > seen:
            self._forget_turns(trajectory, history, session.num_returned)
            self._truncate(trajectory, seen)

    async def generate(
        self,
        session_id: int,
        context: NDArray[np.int32],
        max_new_tokens: int | None,
        lora: str = "",
    ) -> dict[str, Any]:
        """Generates one turn: {"tokens": int32 [n], "finish_reason": "stop" | "length"}. With an
        adapter `lora`, the generation is not part of the trajectory, may have any context, and is
        not replayed here. Raises RolloutError if the session has ended or the context does not fit.
        """
        session = self._find(session_id)
        trajectory = session.trajectory
        context = token_ids(context, self._vocab_size, trajectory.sample_id)
        if len(context) == 0:
            raise RolloutError(
                f"{trajectory.sample_id}: generate() got no tokens to continue; begin with "
                "ctx.prompt_tokens or tokens of your own"
            )
        if max_new_tokens is not None and max_new_tokens < 1:
            raise RolloutError(
                f"{trajectory.sample_id}: generate() got max_new_tokens = {max_new_tokens}; use 1 "
                "or more, or None for all that the budget leaves"
            )
        if lora:
            return await self._generate_aside(session, context, max_new_tokens, lora)
        if session.turn is not None:
            raise RolloutError(f"{trajectory.sample_id}: two generate() calls at a time; await one")
        if len(context) > trajectory.max_context_len:
            # Not added to the trajectory: nothing could follow, and trainers could not hold it.
            trajectory.finish_reason = "length"
            return {"tokens": context[:0], "finish_reason": "length"}
        replayed = self._replay(session, context)
        if replayed is not None:
            session.num_returned += 1
            trajectory.finish_reason = replayed.reason
            tokens = trajectory.tokens[replayed.start : replayed.stop].copy()
            return {"tokens": tokens, "finish_reason": replayed.reason}
        start = self._extend(session, context)
        return await self._generate(session, start, max_new_tokens)

    def recall(self, session_id: int, key: str) -> list[Any]:
        """[value] of `ctx.once(key)` if an earlier run recorded it, else []."""
        once = self._find(session_id).history.once
        return [once[key]] if key in once else []

    async def keep(self, session_id: int, key: str, value: Any) -> None:
        """Records the value of `ctx.once(key)`; returns once it is durable."""
        session = self._find(session_id)
        if key in session.history.once:
            raise RolloutError(
                f"{session.trajectory.sample_id}: ctx.once({key!r}) was done at the same time by "
                "the same loop: await one before the other"
            )
        self._recorder.value_kept(session.trajectory, once_key(key), value)
        session.history.once[key] = value
        await self._recorder.durable()

    def _find(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise RolloutError("this run of the agent loop has ended: it has no trajectory")
        return session

    def _end_run(self, trajectory: Trajectory) -> None:
        session = self._sessions.pop(self._by_trajectory.pop(trajectory, 0), None)
        if session is not None:
            self._end_turns(session)

    def _end_turns(self, session: _Session) -> None:
        self._dispatcher.cancel(session.answers)
        for answer in session.answers.values():
            if not answer.done():
                answer.set_exception(RolloutError("this run of the agent loop has ended"))

    def _replay(self, session: _Session, context: NDArray[np.int32]) -> TurnRecord | None:
        """The record of this very turn; None after the last record, or if the context differs."""
        trajectory, turns = session.trajectory, session.history.turns
        if session.num_returned == len(turns):
            return None
        record = turns[session.num_returned]
        begun_from = trajectory.context()[: len(trajectory.prompt_tokens) + record.start]
        if np.array_equal(begun_from, context):
            self.num_replayed_turns += 1
            return record
        self._forget_turns(trajectory, session.history, session.num_returned)
        self._truncate(trajectory, turns[-1].stop if turns else 0)
        return None

    def _extend(self, session: _Session, context: NDArray[np.int32]) -> int:
        """Appends the loop's context to the trajectory; returns where the new turn's tokens begin.
        Tokens beyond the context may belong to this very turn, if it was interrupted."""
        trajectory, turns = session.trajectory, session.history.turns
        known, prompt_len = trajectory.context(), len(trajectory.prompt_tokens)
        settled = turns[-1].stop if turns else 0
        start = len(context) - prompt_len
        given, made = np.split(trajectory.versions[settled:], [max(0, start - settled)])
        is_resumed = (
            settled <= start <= trajectory.completion_len
            and np.array_equal(known[: len(context)], context)
            and bool((given == NOT_GENERATED).all() and (made != NOT_GENERATED).all())
        )
        if is_resumed:
            return start
        if trajectory.completion_len > settled:
            self._truncate(trajectory, settled)
        start = trajectory.completion_len
        if start == 0 and not np.array_equal(context, trajectory.prompt_tokens):
            self._recorder.prompt_replaced(trajectory, context)
        trajectory.extend_context(context)
        self._recorder.tokens_given(trajectory, start)
        return trajectory.completion_len

    def _forget_turns(self, trajectory: Trajectory, history: LoopHistory, num_kept: int) -> None:
        if num_kept == len(history.turns):
            return
        del history.turns[num_kept:]
        length = history.turns[-1].stop if history.turns else 0
        self._record_turn(trajectory, history, TurnRecord(length, length, ""))

    def _record_turn(
        self, trajectory: Trajectory, history: LoopHistory, record: TurnRecord
    ) -> None:
        self._recorder.value_kept(trajectory, history.next_turn_key(), list(record))

    def _truncate(self, trajectory: Trajectory, length: int) -> None:
        """Cuts the completion to `length` tokens, because the context differs."""
        self.num_diverged += 1
        num_before = trajectory.num_generated
        prompt, tokens = trajectory.prompt_tokens, trajectory.tokens[:length].copy()
        logprobs, segments = trajectory.logprobs[:length].copy(), trajectory.segments()
        trajectory.reset()
        self._recorder.reset(trajectory, "another path when replayed")
        if length and not np.array_equal(prompt, trajectory.prompt.tokens):
            trajectory.extend_context(prompt)
            self._recorder.prompt_replaced(trajectory, prompt)
        for start, stop, version in segments:
            run = slice(start, min(stop, length))
            if run.start >= run.stop:
                continue
            if version == NOT_GENERATED:
                trajectory.extend_context(np.concatenate([trajectory.context(), tokens[run]]))
                self._recorder.tokens_given(trajectory, start)
            else:
                trajectory.append_generated(tokens[run], logprobs[run], version)
                self._recorder.tokens_restored(trajectory, start)
        self._dispatcher.counters["lost_tokens"] += num_before - trajectory.num_generated

    async def _generate(
        self, session: _Session, start: int, max_new_tokens: int | None
    ) -> dict[str, Any]:
        trajectory, history = session.trajectory, session.history
        answer = asyncio.get_running_loop().create_future()

        def on_end(_turn: Turn, reason: str) -> None:
            # Here and not after the wait, because the trajectory may have been reset by then.
            trajectory.finish_reason = reason
            record = TurnRecord(start, trajectory.completion_len, reason)
            history.turns.append(record)
            self._record_turn(trajectory, history, record)
            if not answer.done():
                tokens = trajectory.tokens[start:].copy()
                answer.set_result({"tokens": tokens, "finish_reason": reason})

        budget = trajectory.num_tokens_left() + trajectory.completion_len - start
        session.turn = Turn(
            trajectory=trajectory,
            group=session.group,
            start=start,
            limit=start + (budget if max_new_tokens is None else max_new_tokens),
            sampling=session.sampling,
            on_end=on_end,
        )
        try:
            outcome = await self._answer(session, session.turn, answer)
        finally:
            session.turn = None
        session.num_returned = len(history.turns)
        return outcome

    async def _generate_aside(
        self, session: _Session, context: NDArray[np.int32], max_new_tokens: int | None, lora: str
    ) -> dict[str, Any]:
        """Generates with an adapter. These tokens are not trained on; if the loop appends them to
        its own, they count as given, like a tool's output."""
        limit = session.trajectory.max_context_len
        name = f"{session.trajectory.sample_id} with {lora}"
        budget = max(0, limit - len(context))
        seed = secrets.randbits(_SEED_BITS)
        prompt = Prompt(name, "", context, {})
        aside = Trajectory(name, prompt, seed, budget=budget, max_context_len=limit)
        answer = asyncio.get_running_loop().create_future()

        def on_end(_turn: Turn, reason: str) -> None:
            if not answer.done():
                answer.set_result({"tokens": aside.tokens.copy(), "finish_reason": reason})

        def on_error(error: UmbraError) -> None:
            if not answer.done():
                answer.set_exception(RolloutError(str(error)))

        turn = Turn(
            trajectory=aside,
            group=None,
            start=0,
            limit=budget if max_new_tokens is None else max_new_tokens,
            sampling=session.sampling,
            on_end=on_end,
            on_error=on_error,
            lora=lora,
        )
        return await self._answer(session, turn, answer)

    async def _answer(
        self, session: _Session, turn: Turn, answer: asyncio.Future[dict[str, Any]]
    ) -> dict[str, Any]:
        """Raises RolloutError if the run ends before the turn does."""
        session.answers[turn] = answer
        try:
            self._dispatcher.submit(turn)
            return await answer
        finally:
            del session.answers[turn]
            self._dispatcher.cancel([turn])  # of a caller that is gone, no tokens may arrive later
