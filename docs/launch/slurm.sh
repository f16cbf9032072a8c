#!/bin/bash
# Four machines of 8 GPUs, one torchrun on each; see docs/launch.md. Submit it from a checkout: sbatch docs/launch/slurm.sh
#SBATCH --job-name=wallfacer
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# Of the checkpoints, a folder that all machines share.
checkpoints=${CHECKPOINTS:-$SLURM_SUBMIT_DIR/checkpoints}
# Not `head -n 1`, which would end scontrol by SIGPIPE where there are many machines.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

# srun does not take over what sbatch was told of cores.
# A job that is queued again has its number still, but must not meet what is left of its first run.
srun --kill-on-bad-exit=1 --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
  -m recipes.train_bytes --ring 4 --team 8 --heads 16 --sequence 131072 --steps 10000 \
  --checkpoint "$checkpoints" --save-every 100 --resume --out "runs/$SLURM_JOB_ID"
