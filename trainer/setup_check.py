"""What can be known to be wrong with a run before anything is started for it.

Cheap enough for every start: files are looked at, no model or tokenizer is loaded and no code of
the user's is run. What only these tell is told later, by the process that does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbra.runtime.environment import TorchrunEnvironment
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.function_call import AGENT_CALL, REWARD_CALL
from umbra.runtime.rollout.function_lookup import check_function
from umbra.trainer.config import PoolSection, TrainerConfig
from umbra.trainer.data import check_data
from umbra.trainer.further_pool import FurtherPoolSection, further_model_config
from umbra.trainer.run_dir import check_run_dir
from umbra.trainer.services import prompt_budget, user_folders
from umbra.trainer.tokenizer import read_model_config, vocab_size


def check_setup(config: TrainerConfig, environment: TorchrunEnvironment) -> None:
    """Every rank checks it.

    Raises:
        ConfigError, DataError, RunDirectoryError.
    """
    check_models(config)
    check_stop_tokens(config)
    prompt_budget(config).check()
    check_data(config.data)
    if environment.node_rank == 0:  # they run on this node; other ones need not have them
        check_user_functions(config)
    check_batch_size(config, environment.world_size)
    check_run_dir(config.run, environment.incarnation)


def check_models(config: TrainerConfig) -> None:
    """Raises DataError where a model directory is none, ConfigError where a context is too long."""
    _check_context_len("pool", config.pool, read_model_config(config.model.path))
    for name, pool in config.pools.items():
        _check_context_len(f"pools.{name}", pool, further_model_config(name, pool))


def _check_context_len(
    section: str, pool: PoolSection | FurtherPoolSection, model: Mapping[str, Any]
) -> None:
    """Of the embedded engine only: others stretch a model's limit by its config or their own."""
    limit = model.get("max_position_embeddings")
    if pool.engine != "embedded" or "max_context_len" in pool.engine_args:
        return
    if isinstance(limit, int) and pool.max_context_len is not None and pool.max_context_len > limit:
        raise ConfigError(
            f"{section}.max_context_len = {pool.max_context_len} exceeds the model's "
            f"max_position_embeddings = {limit}: lower it to that or less"
        )


def check_stop_tokens(config: TrainerConfig) -> None:
    """Raises ConfigError where the model does not have all those that the config names."""
    size = vocab_size(config.model.path)
    beyond = [token for token in config.rollout.stop_token_ids if token >= size]
    if size and beyond:
        raise ConfigError(
            f"rollout.stop_token_ids has {beyond}, outside the model's vocabulary of {size} "
            f"(0 to {size - 1}): no completion would end by them"
        )


def check_user_functions(config: TrainerConfig) -> None:
    """Raises ConfigError where a function that the config names surely cannot be called."""
    folders = user_folders(config)
    check_function(config.reward.function, "reward.function", folders, REWARD_CALL)
    if config.rollout.agent is not None:
        check_function(config.rollout.agent, "rollout.agent", folders, AGENT_CALL)


def check_batch_size(config: TrainerConfig, world_size: int) -> None:
    """Raises ConfigError where a step has fewer completions than there are ranks."""
    if config.samples_per_step < world_size:
        raise ConfigError(
            f"rollout.groups_per_step x rollout.group_size is {config.samples_per_step} "
            f"completions a step for {world_size} ranks; every rank needs one: raise either, or "
            f"start {config.samples_per_step} ranks or fewer"
        )
