#!/usr/bin/env bash
# Trains on several processes of this machine, one per GPU (or, without GPUs, on the CPU):
#   NGPU=2 CONFIG_FILE=train_configs/llama3_debug.toml ./run_train.sh --training.steps 50 --parallelism.tensor_parallel_degree 2
# LOG_RANK: the ranks whose output is shown, 0 or for example 0,1.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
NGPU="${NGPU:-1}"
LOG_RANK="${LOG_RANK:-0}"
CONFIG_FILE="${CONFIG_FILE:-$here/train_configs/llama3_debug.toml}"
if [[ ! -e "$CONFIG_FILE" && -e "$here/$CONFIG_FILE" ]]; then
    CONFIG_FILE="$here/$CONFIG_FILE"
fi
torchrun=torchrun
if [[ -x "$here/.venv/bin/torchrun" ]]; then
    torchrun="$here/.venv/bin/torchrun"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "$torchrun" --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 -m quaver train "$CONFIG_FILE" "$@"
