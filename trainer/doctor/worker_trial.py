from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ConnectionLost, RewardError
from umbra.runtime.rollout.agents.rollout_worker import RolloutWorker
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.services.services import open_policy_tokenizer, save_tokenizers, worker_specs

_CAUSE_TIMEOUT_S: Final = 1.0
"""For the supervisor to report how the worker's process ended; it knows within milliseconds."""
_REPORT_TIMEOUT_S: Final = 10.0
"""For a worker whose user code hangs to report that, beyond the limits of the user's code."""


class WorkerTrial:
    """Scores a prompt in a rollout worker, as a run would, below a supervisor of its
    own. Use `open`."""

    def __init__(self, config: TrainerConfig, session: Session, name: str) -> None:
        self._config = config
        self._session = session
        self._name = name

    @classmethod
    @contextmanager
    def open(cls, config: TrainerConfig) -> Generator[WorkerTrial]:
        """Starts the worker, which imports the user's functions. Raises ConfigError if one of
        them cannot be used, DataError without a usable tokenizer, ActorDied if the import
        ended the process."""
        with tempfile.TemporaryDirectory(prefix="umbra-doctor-") as name:
            folder = Path(name)
            save_tokenizers(config, open_policy_tokenizer(config), folder)
            spec = worker_specs(config, 1, folder)[0]
            target = f"{TrialWorker.__module__}:{TrialWorker.__name__}"
            settings, alone = SessionConfig(run_dir=folder), TorchrunEnvironment.read({})
            with Session(settings, alone, on_note=_ignore, on_failed=_ignore) as session:
                session.spawn(replace(spec, target=target, restart=RestartPolicy(mode="never")))
                yield cls(config, session, spec.name)

    def score(self, prompt: Prompt) -> list[float]:
        """The rewards of a group of completions, which all repeat the text of the prompt. Raises
        RewardError, with the row, if the reward function cannot score it, JobFailed if the call
        ended the worker's process."""
        items = [
            {
                "sample_id": f"{prompt.prompt_id}/{idx}",
                "prompt": 0,
                "tokens": prompt.tokens,
                "num_tokens": len(prompt.tokens),
                "finish_reason": "stop",
            }
            for idx in range(self._config.rollout.group_size)
        ]
        worker, reward = self._session.actor(self._name), self._config.reward
        limit_s = len(reward.targets) * reward.timeout_s + _REPORT_TIMEOUT_S
        try:
            arguments = [prompt.to_score()], items, self._name
            scores: dict[str, list[float]] = worker.call("score", *arguments, timeout_s=limit_s)
        except ConnectionLost:
            self._session.raise_if_lost(_CAUSE_TIMEOUT_S)
            raise
        except RewardError as error:
            raise RewardError(f"{error}\nthe row: {prompt.row!r:.500}") from None
        return scores["rewards"]


class TrialWorker(RolloutWorker):
    """A rollout worker that is its own manager: `score` raises what it reports to that."""

    async def score(
        self, prompts: list[dict[str, Any]], items: list[dict[str, Any]], manager: str
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(None) as self._limit:
                return await super().score(prompts, items, manager)
        except TimeoutError:
            raise RewardError(self._reason) from None

    async def report_blocked(self, worker: str, incarnation: int, label: str, reason: str) -> None:
        """Ends `score`, and returns once the trial has its answer: the worker ends after this."""
        self._reason = reason
        self._limit.reschedule(0.0)
        await asyncio.sleep(_REPORT_TIMEOUT_S)


def _ignore(_: object) -> None:
    """The error of the call says what went wrong."""
