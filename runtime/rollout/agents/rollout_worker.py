"""The actor that runs user code (rewards, agent loops) in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Self

from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.errors import ConfigError, RolloutError, UmbraError
from umbra.runtime.rollout.agents.agent_loop import AgentContext, AgentLoop
from umbra.runtime.rollout.agents.auxiliary_pool import ExtendableDeadline, PoolCaller
from umbra.runtime.rollout.agents.reward_function import RewardSum
from umbra.runtime.rollout.agents.user_thread import TaskHost, UserThread
from umbra.runtime.rollout.prompts import to_row
from umbra.runtime.rollout.rollout_config import WorkerConfig
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.settings import from_wire
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.runtime.tracing.spans import span

_RESOLVE_TIMEOUT_S: Final = 10.0
_REPORT_TIMEOUT_S: Final = 5.0
_FACTS: Final = ("num_tokens", "finish_reason")
"""Facts about a completion that reward functions may take besides the columns of the data."""
_PYTHONS_TEXT: Final = "signal only works in main thread of the main interpreter"
"""The message of Python's own error in signal.signal. Verifiers such as math-verify compare it."""
_NOTE: Final = (
    "umbra runs reward functions without `async` on the main thread, where alarms work. Agent "
    "loops and `async def` rewards have it only if there is no such function. Do this in a reward "
    "function without async, and not in asyncio.to_thread; or turn the alarm off, in math-verify "
    "by parsing_timeout=None and timeout_seconds=None."
)

logger = logging.getLogger(__name__)


class RolloutWorker:
    """Scores completions and runs agent loops; has no state between calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = worker = from_wire(WorkerConfig, config)
        sys.path[:0] = [folder for folder in worker.sys_path if folder not in sys.path]
        self._opened: ModelTokenizer | None = None
        self._stack = contextlib.AsyncExitStack()
        _explain_signals()
        self._thread = UserThread("user-code")
        self._pools = PoolCaller(worker.pools)
        self._reward = RewardSum.load(worker, self._thread, self._pools) if worker.rewards else None
        self._agent = AgentLoop(worker.agent, self._thread) if worker.agent else None
        if self._reward is None and self._agent is None:
            raise ConfigError("a rollout worker needs a reward function or an agent loop")
        self._managers: dict[str, Handle] = {}

    async def __aenter__(self) -> Self:
        self._thread.main_thread = actor_context().main_thread
        await self._stack.enter_async_context(self._thread)
        self._calls_out = await self._stack.enter_async_context(TaskHost())
        await self._stack.enter_async_context(self._pools)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Ends the process, with RolloutError, when user code hangs it or ends its event loop."""
        limit = self._config.block_limit_s, "rollout.block_limit_s"
        if self._reward is not None and self._reward.is_async:
            by_reward = self._config.reward_timeout_s / 2, "reward.timeout_s, twice the limit"
            limit = min(limit, by_reward)
        label, reason = await self._thread.broken(*limit)
        context = actor_context()
        for manager in list(self._managers.values()):
            with contextlib.suppress(UmbraError):  # else the manager finds out by quarantine
                arguments = (context.name, context.incarnation, label or "", reason)
                await manager.call("report_blocked", *arguments, timeout_s=_REPORT_TIMEOUT_S)
        raise RolloutError(reason)

    async def score(
        self, prompts: list[dict[str, Any]], items: list[dict[str, Any]], manager: str
    ) -> dict[str, Any]:
        """Scores finished trajectories in one call of each reward function; returns `Scores`.

        Args:
            prompts: of the items, each once, as `Prompt.to_score`.
            items: maps {"sample_id", "prompt": index in `prompts`, "tokens": int32 completion,
                "num_tokens": those that the policy generated, "finish_reason"}.
        """
        if self._reward is None:
            raise ConfigError(
                "an agent loop returned None, and no reward function is configured to score it"
            )
        await self._manager(manager)  # so that `run` can report a call that blocks
        tokenizer = await self._tokenizer()
        completions = [
            tokenizer.decode_completion(item["tokens"].tolist(), self._config.skip_special_tokens)
            for item in items
        ]
        asked: list[dict[str, Any]] = [prompts[item["prompt"]] for item in items]
        with span("reward", overlaps=True, sample=items[0]["sample_id"], samples=len(items)):
            scores = await self._reward(
                [item["sample_id"] for item in items],
                [prompt["text"] for prompt in asked],
                completions,
                [to_row(prompt["row"]) for prompt in asked],
                {name: [item[name] for item in items] for name in _FACTS},
            )
        return scores._asdict()

    async def run_agent(self, item: dict[str, Any], timeout_s: float) -> float | None:
        """Runs the agent loop for one trajectory; returns the reward it gives, if any. `item` maps
        "sample_id", "prompt", "tokens" (int32 prompt), "row", "session" (the manager's id of this
        run) and "manager" (its name)."""
        if self._agent is None:
            raise ConfigError("rollouts are configured as agent loops, but rollout.agent is empty")
        manager = await self._manager(item["manager"])
        tokenizer = await self._tokenizer()

        async def call(method: str, *arguments: object) -> Any:
            # The loop runs on the user thread, but calls must be made on the actor's loop.
            return await self._calls_out.run(
                lambda: manager.call(method, item["session"], *arguments, timeout_s=timeout_s)
            )

        deadline = ExtendableDeadline(timeout_s)
        context = AgentContext(item, self._config, tokenizer, call, self._pools, deadline)
        with span("agent loop", overlaps=True, sample=item["sample_id"]):
            return await self._agent.run(context, item["sample_id"], deadline)

    async def _tokenizer(self) -> ModelTokenizer:
        if self._opened is None:
            self._opened = await asyncio.to_thread(ModelTokenizer.open, self._config.tokenizer_path)
        return self._opened

    async def _manager(self, name: str) -> Handle:
        if name not in self._managers:
            ref = await actor_context().resolve(name, _RESOLVE_TIMEOUT_S)
            self._managers[name] = actor_context().connect(ref)
        return self._managers[name]


def _explain_signals() -> None:
    """Explains why a verifier that sets an alarm fails outside of the main thread: adds a note to
    errors of `signal.signal`, `alarm` and `setitimer`, and logs it once for each."""
    for name in ("signal", "alarm", "setitimer"):
        setattr(signal, name, _explaining(name, getattr(signal, name)))


def _explaining(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return function(*args, **kwargs)
        _log_once(name)
        error = ValueError(_PYTHONS_TEXT)
        error.add_note(_NOTE)
        raise error

    return call


@functools.cache
def _log_once(name: str) -> None:
    logger.warning("signal.%s: %s. %s", name, _PYTHONS_TEXT, _NOTE, stack_info=True)
