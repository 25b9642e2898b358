from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ConnectionLost, RewardError
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.services.services import open_policy_tokenizer, save_tokenizers, worker_specs

_CAUSE_TIMEOUT_S: Final = 1.0
"""For the supervisor to report how the worker's process ended; it knows within milliseconds."""


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
            settings, alone = SessionConfig(run_dir=folder), TorchrunEnvironment.read({})
            with Session(settings, alone, on_note=_ignore, on_failed=_ignore) as session:
                session.spawn(replace(spec, restart=RestartPolicy(mode="never")))
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
        limit_s = (1 + len(reward.targets)) * reward.timeout_s
        try:
            # The manager has to exist, and is not asked for anything.
            arguments = [prompt.to_score()], items, self._name
            scores: dict[str, list[float]] = worker.call("score", *arguments, timeout_s=limit_s)
        except ConnectionLost:
            self._session.raise_if_lost(_CAUSE_TIMEOUT_S)
            raise
        except RewardError as error:
            raise RewardError(f"{error}\nthe row: {prompt.row!r:.500}") from None
        return scores["rewards"]


def _ignore(_: object) -> None:
    """The error of the call says what went wrong."""
