#!/usr/bin/env bash
# Runs on each of NNODES hosts, which share the disk of the run folder:
#   HEAD=host0:29400 NNODES=2 NGPU=8 ./two_hosts.sh train_configs/llama3_8b.toml --job.name=llama --checkpoint.resume=auto
# HEAD is one of the hosts and a free port of it. After a rank died all ranks start again, and resume from the last
# checkpoint. After a host died, run this again on it or on another one; HEAD must live.
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # ranks that start again must not meet the addresses of earlier ones
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec torchrun --nnodes "${NNODES:?}" --nproc-per-node "${NGPU:-8}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?}" --rdzv-id "${JOB:-quaver}" \
    --rdzv-conf "${RDZV_CONF:-keep_alive_interval=5,keep_alive_max_attempt=3}" \
    -m quaver.cli train "$@"
