"""Agent loops in progress: which trajectory a worker's `generate` belongs to."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.dispatch import Dispatcher
from umbra.runtime.rollout.group import Group
from umbra.runtime.rollout.trajectory import Trajectory
from umbra.runtime.rollout.turn import Turn


class _Session:
    __slots__ = ("group", "temperature", "trajectory", "turn")

    def __init__(self, trajectory: Trajectory, group: Group, temperature: float) -> None:
        self.trajectory = trajectory
        self.group = group
        self.temperature = temperature
        self.turn: Turn | None = None


class AgentSessions:
    """One session per run of an agent loop; a loop that runs again gets a new one, and what
    is left of the old one is refused."""

    def __init__(self, dispatcher: Dispatcher, stop_token_ids: list[int]) -> None:
        self._dispatcher = dispatcher
        self._stop_token_ids = stop_token_ids
        self._sessions: dict[int, _Session] = {}
        self._by_trajectory: dict[Trajectory, int] = {}
        self._ids = itertools.count(1)

    def open(self, trajectory: Trajectory, group: Group, temperature: float) -> int:
        """Starts a trajectory over and returns the id of its session."""
        self.close(trajectory)
        if trajectory.completion_len:
            trajectory.num_interruptions += 1
        trajectory.reset()
        session_id = next(self._ids)
        self._sessions[session_id] = _Session(trajectory, group, temperature)
        self._by_trajectory[trajectory] = session_id
        return session_id

    def close(self, trajectory: Trajectory) -> None:
        """Ends a trajectory's session, if it has one."""
        session = self._sessions.pop(self._by_trajectory.pop(trajectory, 0), None)
        if session is not None and session.turn is not None:
            self._dispatcher.cancel([session.turn])

    async def generate(
        self, session_id: int, context: NDArray[np.int32], max_new_tokens: int | None
    ) -> dict[str, Any]:
        """Generates one turn; {"tokens": int32 [n], "finish_reason": "stop" | "length"}.

        Raises:
            RolloutError: the session has ended, is generating already, or `context` is not what
                the trajectory holds plus more.
            ValueError: an empty context, or a `max_new_tokens` below 1.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise RolloutError("this run of the agent loop has ended: generate() has no trajectory")
        trajectory = session.trajectory
        if session.turn is not None:
            raise RolloutError(f"{trajectory.sample_id}: two generate() calls at a time; await one")
        if len(context) == 0 or (max_new_tokens is not None and max_new_tokens < 1):
            raise ValueError("generate() needs at least one token and max_new_tokens of 1 or more")
        trajectory.extend_context(context)
        start = trajectory.completion_len
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def on_end(_turn: Turn, reason: str) -> None:
            # Here and not after the wait, when the trajectory may have been started over.
            trajectory.finish_reason = reason
            if not answer.done():
                tokens = trajectory.tokens[start:].copy()
                answer.set_result({"tokens": tokens, "finish_reason": reason})

        turn = session.turn = Turn(
            trajectory=trajectory,
            group=session.group,
            start=start,
            limit=start + (trajectory.room() if max_new_tokens is None else max_new_tokens),
            temperature=session.temperature,
            stop_token_ids=self._stop_token_ids,
            on_end=on_end,
        )
        try:
            self._dispatcher.submit(turn)
            return await answer
        except asyncio.CancelledError:  # the caller went away: its tokens must not come later
            self._dispatcher.cancel([turn])
            raise
        finally:
            session.turn = None
