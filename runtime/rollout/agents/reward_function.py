"""Calls the user's reward function and checks what it returns. G: samples in a call."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import numpy as np

from umbra.runtime.errors import ConfigError, RewardError
from umbra.runtime.rollout.agents.auxiliary_pool import (
    ExtendableDeadline,
    PoolCaller,
    RewardContext,
)
from umbra.runtime.rollout.agents.user_thread import UserThread
from umbra.runtime.rollout.rollout_config import WorkerConfig
from umbra.runtime.rollout.user_function import (
    advice,
    check_call,
    describe,
    is_async,
    load_function,
)

logger = logging.getLogger(__name__)

_VARIADIC: Final = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_SHOWN_SAMPLES: Final = 4
_CONTEXT: Final = "ctx"
_LET_IT_RETURN: Final = "; let it return a number (such as 0.0) for samples it cannot judge"
_NO_NUMBER: Final = "rewards must be finite numbers: return 0.0 for what cannot be judged"

REWARD_LIMIT: Final = float(np.finfo(np.float32).max) / 2
"""Largest absolute reward. Beyond it, an advantage could exceed float32."""

_ONLY: Final = ""
"""Name of the only reward function."""


_GIVEN: Final = frozenset({"prompts", "completions"})


def no_reward(completions: Sequence[str], **_columns: Any) -> list[float]:
    return [0.0] * len(completions)


class _Parameters(NamedTuple):
    """The names that a function takes as keywords."""

    accepted: frozenset[str]
    required: frozenset[str]
    takes_any: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in _VARIADIC]
        return cls(
            accepted=frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is inspect.Parameter.empty),
            takes_any=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        )


class RewardFunction:
    """`def reward(prompts, completions, **columns) -> list[float]`, or `async def`.

    It gets G prompts, G completions and, for each column of the data set that it takes, a list of G
    values; the facts of a call are columns, too. An `async def` with an argument `ctx` gets a
    `RewardContext`, which gives access to other models. It must return G finite numbers; otherwise,
    or if it raises or takes too long, the call raises RewardError with samples, cause and remedy.

    Args:
        target: `module:function`.
        may_skip: it may return None for a sample, which becomes NaN.
        timeout_s: deadline of one call from the moment that the function begins, excluding the time
            that other models take to answer.
    """

    def __init__(
        self,
        target: str,
        thread: UserThread,
        timeout_s: float,
        pools: PoolCaller | None = None,
        *,
        setting: str = "reward.function",
        may_skip: bool = False,
    ) -> None:
        self.target = target
        self._may_skip = may_skip
        self._function: Callable[..., Any] = load_function(target, setting)
        self._parameters = _Parameters.of(self._function)
        columns = sorted(self._parameters.required - _GIVEN)
        keywords = ["prompts", "completions", *columns]
        check_call(self._function, f"{setting} {target!r}", positional=[], keywords=keywords)
        self.is_async = is_async(self._function)
        if not self.is_async:
            thread.expect_functions()
        self._takes_context = _CONTEXT in self._parameters.accepted
        if self._takes_context and not self.is_async:
            raise ConfigError(
                f"reward function {target} takes {_CONTEXT}, whose answers must be awaited: make "
                "it an async def"
            )
        self._pools = pools
        self._thread = thread
        self._timeout_s = timeout_s

    async def __call__(
        self,
        sample_ids: Sequence[str],
        prompts: list[str],
        completions: list[str],
        rows: Sequence[Mapping[str, Any]],
        facts: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    ) -> list[float]:
        """Returns [G] rewards."""
        samples = _name(sample_ids)
        columns = self._columns(rows, facts, samples)
        deadline = ExtendableDeadline(self._timeout_s)
        if self._takes_context and self._pools is not None:
            columns[_CONTEXT] = RewardContext(self._pools, deadline)
        try:
            async with deadline:
                return await self._call(prompts, completions, columns, sample_ids, deadline)
        except (RewardError, asyncio.CancelledError):
            raise
        except BaseException as error:  # user code may raise anything
            if deadline.expired:
                raise RewardError(self._too_slow(samples)) from None
            raise RewardError(
                f"reward function {self.target} raised {describe(error)} for {samples}"
                f"{advice(error, _LET_IT_RETURN)}"
            ) from error

    def _too_slow(self, samples: str) -> str:
        return (
            f"reward function {self.target} took longer than {self._timeout_s:.3g} s for "
            f"{samples}; make it faster, limit its waits, or raise reward.timeout_s"
        )

    async def _call(
        self,
        prompts: list[str],
        completions: list[str],
        columns: dict[str, Any],
        sample_ids: Sequence[str],
        deadline: ExtendableDeadline,
    ) -> list[float]:
        # A function may change its arguments, and others get the same ones.
        arguments = {"prompts": [*prompts], "completions": [*completions], **columns}

        # The result is checked where user code runs, because reading it may run user code, too.
        def call() -> list[float]:
            return self._checked(self._function(**arguments), sample_ids)

        async def call_async() -> list[float]:
            result = await self._function(**arguments)
            return self._checked(result, sample_ids)

        label = sample_ids[0]
        # The time that other models take is not the function's.
        if self.is_async:
            return await self._thread.run_async(call_async, label, deadline.start)
        too_slow = self._too_slow(_name(sample_ids))
        return await self._thread.run_sync(call, label, self._timeout_s, too_slow)

    def _columns(
        self,
        rows: Sequence[Mapping[str, Any]],
        facts: Mapping[str, Sequence[Any]],
        samples: str,
    ) -> dict[str, Any]:
        parameters = self._parameters
        given = _GIVEN | ({_CONTEXT} if self._takes_context else set[str]())
        present = set[str]().union(*rows) - given
        if both := present & facts.keys() & parameters.accepted:
            raise RewardError(
                f"reward function {self.target} takes {sorted(both)}, which umbra has for each "
                "completion, and the data set has as a column: rename the column"
            )
        missing = parameters.required - given - present - facts.keys()
        if missing:
            raise RewardError(
                f"reward function {self.target} takes {sorted(missing)}, which the "
                f"data set lacks for {samples}; its columns are {sorted(present)}"
            )
        wanted = present | facts.keys() if parameters.takes_any else parameters.accepted
        own = {name: list(values) for name, values in facts.items() if name in wanted}
        return own | {name: [row.get(name) for row in rows] for name in sorted(present & wanted)}

    def _checked(self, result: Any, sample_ids: Sequence[str]) -> list[float]:
        try:
            iterator: Iterator[Any] = iter(result)
        except TypeError:
            raise RewardError(
                f"reward function {self.target} returned {type(result).__name__} for "
                f"{_name(sample_ids)}; return a list with one number for each completion"
            ) from None
        values = list(itertools.islice(iterator, len(sample_ids) + 1))  # it may have no end
        if len(values) != len(sample_ids):
            number = len(values) if len(values) < len(sample_ids) else "more"
            raise RewardError(
                f"reward function {self.target} returned {number} rewards for "
                f"{len(sample_ids)} completions ({_name(sample_ids)}); return one for each"
            )
        return [
            math.nan
            if value is None and self._may_skip
            else reward_value(value, f"reward function {self.target}", sample_id, _NO_NUMBER)
            for value, sample_id in zip(values, sample_ids, strict=True)
        ]


def _name(sample_ids: Sequence[str]) -> str:
    shown = ", ".join(sample_ids[:_SHOWN_SAMPLES])
    more = len(sample_ids) - _SHOWN_SAMPLES
    return f"samples {shown}" + (f" and {more} more" if more > 0 else "")


def reward_value(value: Any, giver: str, sample_id: str, remedy: str) -> float:
    """Converts a reward from user code: a number of Python, or a scalar of numpy or torch. Raises
    RewardError for text, and for a number that is not finite or beyond REWARD_LIMIT."""
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:  # an int whose digits may be too many to show
        raise _too_large("a number beyond 1.8e308", giver, sample_id) from None
    except Exception:  # noqa: BLE001 -- `__float__` of anything; torch's raises RuntimeError
        number = math.nan
    if not math.isfinite(number):
        shown = reprlib.repr(value)
        raise RewardError(f"{giver} returned {shown} for sample {sample_id}; {remedy}")
    if abs(number) > REWARD_LIMIT:
        raise _too_large(f"{number:.4g}", giver, sample_id)
    return number


def _too_large(shown: str, giver: str, sample_id: str) -> RewardError:
    return RewardError(
        f"{giver} returned {shown} for sample {sample_id}; rewards must lie within "
        f"{REWARD_LIMIT:.4g} of zero, so that float32 holds their advantages: scale them down"
    )


class Scores(NamedTuple):
    """`rewards` [G], and `parts` [G] by function before weights: NaN where one does not apply."""

    rewards: list[float]
    parts: dict[str, list[float]]


class RewardSum:
    """Adds the values of several reward functions, each times its weight (default 1). A
    function may return None for a sample that it does not apply to. Where none applies the
    reward is 0, as in TRL."""

    def __init__(
        self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float]
    ) -> None:
        self._functions = functions
        self._weights = weights
        self.is_async = any(function.is_async for function in functions.values())

    @classmethod
    def load(cls, config: WorkerConfig, thread: UserThread, pools: PoolCaller) -> Self:
        """Raises ConfigError for a function that cannot be called."""
        functions = {
            name: RewardFunction(
                target,
                thread,
                config.reward_timeout_s,
                pools,
                setting=f"reward.functions.{name}" if name else "reward.function",
                may_skip=len(config.rewards) > 1,
            )
            for name, target in config.rewards.items()
        }
        return cls(functions, config.reward_weights)

    async def __call__(
        self,
        sample_ids: Sequence[str],
        prompts: list[str],
        completions: list[str],
        rows: Sequence[Mapping[str, Any]],
        facts: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """Calls one function after the other, each with its own deadline."""
        arguments = sample_ids, prompts, completions, rows, facts
        if _ONLY in self._functions:
            return Scores(await self._functions[_ONLY](*arguments), {})
        parts = {name: await function(*arguments) for name, function in self._functions.items()}
        rewards = [
            self._sum(sample_id, {name: values[idx] for name, values in parts.items()})
            for idx, sample_id in enumerate(sample_ids)
        ]
        return Scores(rewards, parts)

    def _sum(self, sample_id: str, values: Mapping[str, float]) -> float:
        weighted = [
            value * self._weights.get(name, 1.0)
            for name, value in values.items()
            if not math.isnan(value)
        ]
        if not weighted:
            _warn_of_none(", ".join(values))
        reward = math.fsum(weighted)
        if abs(reward) > REWARD_LIMIT:
            raise RewardError(
                f"the weighted sum of {', '.join(values)} is {reward:.4g} for sample {sample_id}; "
                f"rewards must lie within {REWARD_LIMIT:.4g} of zero: lower reward.weights"
            )
        return reward


@functools.cache
def _warn_of_none(names: str) -> None:
    logger.warning("none of %s applies to some samples: their reward is 0", names)
