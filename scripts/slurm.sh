#!/usr/bin/env bash
# Train on the GPUs of several hosts under Slurm, in the environment .venv of this clone:
#     sbatch scripts/slurm.sh --config configs/heinsen_125m_pile.py --workdir /shared/runs/pile --mesh.fsdp 8
# Adapt the options below to the cluster: one task per GPU. Before the time limit, the run saves a
# checkpoint and is queued again.
#SBATCH --job-name=heinsen_jax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

is_over=""
# The script waits for srun in the background, since bash runs a trap only between commands.
trap 'is_over=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun .venv/bin/python train.py "$@" &
step=$!
wait "$step"
status=$?
if [[ -n $is_over ]]; then
    wait "$step" # the first `wait` ended with the signal
    status=$?
    echo "time is over: exit code $status"
    if ((status == 143)); then # saved after SIGTERM
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$status"
