"""Agent loops in progress: which trajectory a worker's `generate` belongs to, and replaying.

A loop whose process died runs again from its beginning. What it generated before is still here: its
n-th `generate` with the same context gets the same tokens, at once, and where the records end it
goes on as if nothing had happened. Where it takes another path, what came after is given up.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.engine_api.token_ids import token_ids
from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.dispatch.side_generations import SideGenerations
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED, Trajectory
from umbra.runtime.rollout.dispatch.turn import Turn
from umbra.runtime.rollout.ledger.recorder import Recorder

_TURN_KEY: Final = "turn/"  # of records of turns, beside those of `ctx.once`, which begin otherwise
_ONCE_KEY: Final = "once/"


class TurnRecord(NamedTuple):
    """A generation that came to its end: completion tokens [start, stop) of the trajectory."""

    start: int
    stop: int
    reason: str


class _Memory:
    """What outlives the runs of one trajectory's loop."""

    __slots__ = ("num_turns_kept", "once", "turns")

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []
        self.num_turns_kept = 0  # names of records are never used twice
        self.once: dict[str, Any] = {}


class _Session:
    __slots__ = (
        "answer", "asides", "group", "memory", "num_returned", "temperature", "trajectory", "turn",
    )  # fmt: skip

    def __init__(
        self,
        trajectory: Trajectory,
        group: Group,
        temperature: float,
        memory: _Memory,
        asides: SideGenerations,
    ) -> None:
        self.trajectory = trajectory
        self.asides = asides
        self.group = group
        self.temperature = temperature
        self.memory = memory
        self.num_returned = 0  # turns that this run of the loop has got
        self.turn: Turn | None = None
        self.answer: asyncio.Future[dict[str, Any]] | None = None


class AgentSessions:
    """One session per run of an agent loop; a loop that runs again gets a new one, and what
    is left of the old one is refused."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        recorder: Recorder,
        stop_token_ids: Sequence[int],
        vocab_size: int = 0,
    ) -> None:
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._stop_token_ids = stop_token_ids
        self._vocab_size = vocab_size  # 0: not known
        self._sessions: dict[int, _Session] = {}
        self._by_trajectory: dict[Trajectory, int] = {}
        self._memories: dict[Trajectory, _Memory] = {}
        # A loop of an earlier manager's must not hit a session of this one.
        self._ids = itertools.count(secrets.randbits(48))
        self.num_replayed_turns = 0
        self.num_diverged = 0

    def remember(self, trajectory: Trajectory, records: Mapping[str, Any]) -> None:
        """What the ledger has kept of an earlier life's loop for this trajectory."""
        memory = self._memories[trajectory] = _Memory()
        for key, value in records.items():
            if key.startswith(_ONCE_KEY):
                memory.once[key.removeprefix(_ONCE_KEY)] = value
                continue
            memory.num_turns_kept += 1
            record = TurnRecord(*value)
            # a later record of the same place is of a later run, which took another path
            memory.turns = [turn for turn in memory.turns if turn.stop <= record.start]
            if record.stop > record.start or record.reason:
                memory.turns.append(record)
        # tokens that a restored checkpoint took back took their turns along
        kept = [turn for turn in memory.turns if turn.stop <= trajectory.completion_len]
        self._forget_turns(trajectory, memory, len(kept))

    def open(self, trajectory: Trajectory, group: Group, temperature: float) -> int:
        """A new run of the loop; returns the id of its session."""
        self._end_run(trajectory)
        if trajectory.completion_len:
            trajectory.cut()
        self._recorder.cut(trajectory)
        memory = self._memories.setdefault(trajectory, _Memory())
        session_id = next(self._ids)
        asides = SideGenerations(self._dispatcher, trajectory, self._stop_token_ids)
        self._sessions[session_id] = _Session(trajectory, group, temperature, memory, asides)
        self._by_trajectory[trajectory] = session_id
        return session_id

    def close(self, trajectory: Trajectory) -> None:
        """Ends a trajectory's session, if it has one; nothing is replayed any more."""
        self._end_run(trajectory)
        self._memories.pop(trajectory, None)

    def settle(self, trajectory: Trajectory) -> None:
        """The loop has returned: what it never got is given up."""
        session = self._sessions.get(self._by_trajectory.get(trajectory, 0))
        if session is None:
            return
        session.asides.close()
        memory = session.memory
        seen = memory.turns[session.num_returned - 1].stop if session.num_returned else 0
        if session.turn is not None:
            self._dispatcher.cancel([session.turn])
        if trajectory.completion_len > seen:
            self._forget_turns(trajectory, memory, session.num_returned)
            self._give_up(trajectory, seen)

    async def generate(
        self,
        session_id: int,
        context: NDArray[np.int32],
        max_new_tokens: int | None,
        lora: str = "",
    ) -> dict[str, Any]:
        """Generates one turn; {"tokens": int32 [n], "finish_reason": "stop" | "length"}.

        Args:
            lora: an adapter of the pool's. What it generates is no part of the trajectory, from
                any context, and is not replayed here.

        Raises:
            RolloutError: the session has ended, is generating already, or `context` is not what
                the trajectory holds plus more.
            RequestRefused: a token is outside the model's vocabulary.
            ValueError: an empty context, or a `max_new_tokens` below 1.
        """
        session = self._find(session_id)
        trajectory = session.trajectory
        context = token_ids(context, self._vocab_size, trajectory.sample_id)
        if len(context) == 0 or (max_new_tokens is not None and max_new_tokens < 1):
            raise ValueError("generate() needs at least one token and max_new_tokens of 1 or more")
        if lora:
            return await session.asides.generate(context, max_new_tokens, session.temperature, lora)
        if session.turn is not None:
            raise RolloutError(f"{trajectory.sample_id}: two generate() calls at a time; await one")
        if len(context) > trajectory.max_context_len:
            # no part of the trajectory: nothing could follow it, and who trains could not hold it
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
        """[value] of `ctx.once(key)` if an earlier run has it, else []."""
        once = self._find(session_id).memory.once
        return [once[key]] if key in once else []

    async def keep(self, session_id: int, key: str, value: Any) -> None:
        """Records the value of `ctx.once(key)`; returns once it is durable."""
        session = self._find(session_id)
        if key in session.memory.once:
            raise RolloutError(
                f"{session.trajectory.sample_id}: ctx.once({key!r}) was done at the same time by "
                "the same loop: await one before the other"
            )
        self._recorder.kept(session.trajectory, _ONCE_KEY + key, value)
        session.memory.once[key] = value
        await self._recorder.durable()

    # -- private -------------------------------------------------------------------------

    def _find(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise RolloutError("this run of the agent loop has ended: it has no trajectory")
        return session

    def _end_run(self, trajectory: Trajectory) -> None:
        session = self._sessions.pop(self._by_trajectory.pop(trajectory, 0), None)
        if session is None:
            return
        session.asides.close()
        if session.turn is None:
            return
        self._dispatcher.cancel([session.turn])
        if session.answer is not None and not session.answer.done():
            session.answer.set_exception(RolloutError("this run of the agent loop has ended"))

    def _replay(self, session: _Session, context: NDArray[np.int32]) -> TurnRecord | None:
        """The recorded turn that this is; None where the records end, or end here."""
        trajectory, turns = session.trajectory, session.memory.turns
        if session.num_returned == len(turns):
            return None
        record = turns[session.num_returned]
        begun_from = trajectory.context()[: len(trajectory.prompt_tokens) + record.start]
        if np.array_equal(begun_from, context):
            self.num_replayed_turns += 1
            return record
        self._forget_turns(trajectory, session.memory, session.num_returned)
        self._give_up(trajectory, turns[-1].stop if turns else 0)
        return None

    def _extend(self, session: _Session, context: NDArray[np.int32]) -> int:
        """The loop's context becomes the trajectory's; where the new turn's tokens begin.

        What is there beyond the context may be of this very turn, cut in the middle or before its
        first token.
        """
        trajectory, turns = session.trajectory, session.memory.turns
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
            self._give_up(trajectory, settled)
        prompt, start = trajectory.prompt_tokens, trajectory.completion_len
        trajectory.extend_context(context)
        if not np.array_equal(prompt, trajectory.prompt_tokens):
            self._recorder.prompt(trajectory)
        self._recorder.given(trajectory, start)
        return trajectory.completion_len

    def _forget_turns(self, trajectory: Trajectory, memory: _Memory, num_kept: int) -> None:
        """Drops the records of all but the first turns, also for later lives."""
        if num_kept == len(memory.turns):
            return
        del memory.turns[num_kept:]
        length = memory.turns[-1].stop if memory.turns else 0
        self._keep_turn(trajectory, memory, TurnRecord(length, length, ""))

    def _keep_turn(self, trajectory: Trajectory, memory: _Memory, record: TurnRecord) -> None:
        memory.num_turns_kept += 1
        self._recorder.kept(trajectory, f"{_TURN_KEY}{memory.num_turns_kept}", list(record))

    def _give_up(self, trajectory: Trajectory, length: int) -> None:
        """The loop took another path: keeps the first `length` tokens of the completion."""
        self.num_diverged += 1
        num_before = trajectory.num_generated
        prompt, tokens = trajectory.prompt_tokens, trajectory.tokens[:length].copy()
        logprobs, segments = trajectory.logprobs[:length].copy(), trajectory.segments()
        trajectory.reset()
        self._recorder.reset(trajectory, "another path when replayed")
        if length and not np.array_equal(prompt, trajectory.prompt.tokens):
            trajectory.extend_context(prompt)
            self._recorder.prompt(trajectory)
        for start, stop, version in segments:
            run = slice(start, min(stop, length))
            if run.start >= run.stop:
                continue
            if version == NOT_GENERATED:
                trajectory.extend_context(np.concatenate([trajectory.context(), tokens[run]]))
                self._recorder.given(trajectory, start)
            else:
                trajectory.append_generated(tokens[run], logprobs[run], version)
                self._recorder.again(trajectory, start)
        self._dispatcher.counters["lost_tokens"] += num_before - trajectory.num_generated

    async def _generate(
        self, session: _Session, start: int, max_new_tokens: int | None
    ) -> dict[str, Any]:
        trajectory, memory = session.trajectory, session.memory
        answer = session.answer = asyncio.get_running_loop().create_future()

        def on_end(_turn: Turn, reason: str) -> None:
            # Here and not after the wait, when the trajectory may have been started over.
            trajectory.finish_reason = reason
            record = TurnRecord(start, trajectory.completion_len, reason)
            memory.turns.append(record)
            self._keep_turn(trajectory, memory, record)
            if not answer.done():
                tokens = trajectory.tokens[start:].copy()
                answer.set_result({"tokens": tokens, "finish_reason": reason})

        budget = trajectory.room() + trajectory.completion_len - start
        turn = session.turn = Turn(
            trajectory=trajectory,
            group=session.group,
            start=start,
            limit=start + (budget if max_new_tokens is None else max_new_tokens),
            temperature=session.temperature,
            stop_token_ids=self._stop_token_ids,
            on_end=on_end,
        )
        try:
            self._dispatcher.submit(turn)
            outcome: dict[str, Any] = await answer
            session.num_returned = len(memory.turns)
            return outcome
        except asyncio.CancelledError:  # the caller went away: its tokens must not come later
            self._dispatcher.cancel([turn])
            raise
        finally:
            session.turn = session.answer = None
