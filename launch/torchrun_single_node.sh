#!/usr/bin/env bash
# Trains on this machine: one rank per GPU, or two ranks where there is none.
#
#   launch/torchrun_single_node.sh CONFIG.toml [section.key=value ...]
#
# NUM_RANKS sets another number of ranks. Torchrun finds a free port by itself. After `nohup` it
# trains on when the terminal is closed; otherwise that ends it as SIGTERM does, with a checkpoint.
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: [NUM_RANKS=N] $0 CONFIG.toml [section.key=value ...]" >&2
    exit 2
fi

num_gpus=0
if command -v nvidia-smi >/dev/null; then
    num_gpus=$(nvidia-smi --list-gpus | wc -l)
fi
num_ranks=${NUM_RANKS:-$((num_gpus > 0 ? num_gpus : 2))}

# Where SIGHUP is ignored torchrun would handle it all the same, and pass it on to the ranks.
if [[ -n $(trap -p HUP) ]]; then
    export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT}
fi

exec torchrun --standalone --nproc-per-node "$num_ranks" -m umbra.trainer "$@"
