#!/usr/bin/env bash
# Trains on several machines. Run the same command on each of them, in the same shared folder:
#
#   NUM_NODES=2 RDZV_ENDPOINT=node1:29400 RDZV_ID=NAME \
#       launch/torchrun_multi_node.sh CONFIG.toml [section.key=value ...]
#
# RDZV_ENDPOINT is one of the machines, with a port that is free there; RDZV_ID is the job's name.
# Each machine has one rank on each of the trainer's GPUs (job.trainer_gpus_per_node, by default
# all), or two ranks without a GPU; NUM_RANKS sets another number. UMBRA_HOST_ADDRESS sets the
# machine's own address for the others. With MAX_RESTARTS=N above 0, the training continues on at
# least MIN_NODES of the machines if others are lost. docs/cluster.md has the rest.
#
# Closing a terminal stops the training on all machines like SIGTERM, with a checkpoint; under
# `nohup` the training continues.
set -euo pipefail

if [[ $# -lt 1 || -z ${NUM_NODES:-} || -z ${RDZV_ENDPOINT:-} || -z ${RDZV_ID:-} ]]; then
    echo "usage: NUM_NODES=N RDZV_ENDPOINT=HOST:PORT RDZV_ID=NAME [NUM_RANKS=N]" \
        "[MIN_NODES=N MAX_RESTARTS=N] [UMBRA_HOST_ADDRESS=ADDRESS] $0 CONFIG.toml [section.key=value ...]" >&2
    exit 2
fi

num_ranks=${NUM_RANKS:-$(python -m umbra.trainer.config.launch_values num_ranks "$@")}

max_restarts=${MAX_RESTARTS:-0}
if [[ ${MIN_NODES:-$NUM_NODES} -lt $NUM_NODES && $max_restarts -eq 0 ]]; then
    echo "MIN_NODES=$MIN_NODES needs MAX_RESTARTS=N: torchrun restarts the ranks when nodes change" >&2
    exit 2
fi
if [[ $max_restarts -gt 0 ]]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # the ranks may find no store where it was before
fi

exec torchrun \
    --nnodes "${MIN_NODES:-$NUM_NODES}:$NUM_NODES" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$RDZV_ENDPOINT" \
    --rdzv-id "$RDZV_ID" \
    ${UMBRA_HOST_ADDRESS:+--local-addr "$UMBRA_HOST_ADDRESS"} \
    --max-restarts "$max_restarts" \
    --nproc-per-node "$num_ranks" \
    -m umbra.trainer "$@"
