"""`python -m umbra.trainer.config.rank_count CONFIG.toml [section.key=value ...]`: prints how many
ranks a launch script has to start on this node. Loads no torch."""

from __future__ import annotations

import sys
from typing import Final

from umbra.runtime.cluster.environment import visible_gpus
from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.process.nvml import count_gpus
from umbra.trainer.config.config_file import load_config
from umbra.trainer.config.trainer_config import TrainerConfig

_NUM_RANKS_ON_CPU: Final = 2


def num_ranks(config: TrainerConfig, num_gpus: int) -> int:
    """One rank for each of the trainer's GPUs. Raises ConfigError if there are fewer than the
    setting asks for: `num_gpus` are this node's that the job may use."""
    if num_gpus == 0 or config.train.device == "cpu":
        return _NUM_RANKS_ON_CPU
    chosen = config.job.trainer_gpus_per_node or num_gpus
    if chosen > num_gpus:
        raise ConfigError(
            f"job.trainer_gpus_per_node = {chosen}, and this node shows {num_gpus} GPUs: lower it, "
            "or leave it out to use all"
        )
    return chosen


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    try:
        config = load_config(argv[0], argv[1:])
        print(num_ranks(config, len(visible_gpus(count_gpus()))))
    except UmbraError as error:
        print(f"umbra: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
