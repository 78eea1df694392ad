#!/usr/bin/env bash
# llama3-8b-8xh100 on 1 x 8 GPUs. Run this on each host, in the same folder. Where there are several, they share
# the disk of the run folder, and HEAD=host0:29400 names one of them and a free port of it. Arguments are more settings.
# After a rank died all ranks start again, and resume from the last checkpoint. After a host died, run this again on it
# or on another one; HEAD must live.
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # ranks that start again must not meet the addresses of earlier ones
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270 # s from SIGTERM to SIGKILL, for a checkpoint
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec torchrun --nnodes 1 --nproc-per-node 8 --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost:0}" --rdzv-id "${JOB:-llama3-8b-8xh100}" \
    --rdzv-conf "join_timeout=1800,${RDZV_CONF:-keep_alive_interval=5,keep_alive_max_attempt=3}" \
    -m quaver train train_configs/llama3_8b_8xh100.toml --job.name=llama3-8b-8xh100 --checkpoint.resume=auto "$@"
