#!/usr/bin/env bash
# Trains on this machine with one rank on each of the trainer's GPUs (job.trainer_gpus_per_node, by
# default all), or with two ranks without a GPU.
#
#   launch/torchrun_single_node.sh CONFIG.toml [section.key=value ...]
#
# NUM_RANKS sets another number of ranks. torchrun finds a free port by itself. Closing the terminal
# stops the training like SIGTERM, with a checkpoint; under `nohup` the training continues.
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: [NUM_RANKS=N] $0 CONFIG.toml [section.key=value ...]" >&2
    exit 2
fi

num_ranks=${NUM_RANKS:-$(python -m umbra.trainer.config.launch_values num_ranks "$@")}

exec torchrun --standalone --nproc-per-node "$num_ranks" -m umbra.trainer "$@"
