"""Scores a prompt of the data set in a rollout worker, as a run would, for `umbra doctor`."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from umbra.runtime.actor.restart_policy import RestartPolicy
from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ConnectionLost, RewardError
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.session import Session, SessionConfig
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.services import open_tokenizers, worker_specs

_CAUSE_TIMEOUT_S: Final = 1.0
"""For the supervisor to report how the worker's process ended; it knows within milliseconds."""


def try_reward(config: TrainerConfig, prompt: Prompt) -> list[float]:
    """The rewards of a group of completions, which all repeat the text of the prompt.

    Raises:
        RewardError: the reward function cannot score it; the message has the row.
        JobFailed: the call ended the worker's process.
    """
    with tempfile.TemporaryDirectory(prefix="umbra-doctor-") as name:
        folder = Path(name)
        open_tokenizers(config, folder)
        spec = worker_specs(config, 1, folder)[0]
        spec = replace(spec, restart=RestartPolicy(mode="never"))
        items = [
            {
                "sample_id": f"{prompt.prompt_id}/{idx}",
                "prompt": prompt.text,
                "tokens": prompt.tokens,
                "row": prompt.row,
                "manager": spec.name,  # which has to exist, and is not asked for anything
            }
            for idx in range(config.rollout.group_size)
        ]
        settings = SessionConfig(run_dir=folder)
        alone = TorchrunEnvironment.read({})
        with Session(settings, alone, on_note=_ignore, on_failed=_ignore) as session:
            worker = session.spawn(spec)
            try:
                return worker.call("score", items, timeout_s=2 * config.reward.timeout_s)
            except ConnectionLost:
                session.raise_if_lost(_CAUSE_TIMEOUT_S)
                raise
            except RewardError as error:
                raise RewardError(f"{error}\nthe row: {prompt.row!r:.500}") from None


def _ignore(_: object) -> None:
    """The error of the call says what went wrong."""
