"""Prints what a launch script needs of a config. Loads no torch.

    python -m umbra.trainer.config.launch_values num_ranks CONFIG.toml [section.key=value ...]
    python -m umbra.trainer.config.launch_values run_dir CONFIG.toml [section.key=value ...]

`num_ranks` is the number of ranks to start on this node.
"""

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
        config = load_config(argv[1], argv[2:])
        if argv[0] == "run_dir":
            print(config.run.dir)
        else:
            print(num_ranks(config, len(visible_gpus(count_gpus()))))
    except UmbraError as error:
        print(f"umbra: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
