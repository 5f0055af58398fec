#!/usr/bin/env bash
# Train on several machines under Slurm, from the repository's root on a disk that all of them share:
#     sbatch --nodes=2 --gpus-per-node=8 scripts/slurm.sh --context_length 1048576 --data DIR --output_dir DIR
# Before the time limit the job is told to stop; it saves, and goes back into the queue to continue where it was.
#SBATCH --job-name=longhaul
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}"  # seconds that a save may take
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
folder=runs/default
for ((i = 1; i <= $#; i++)); do  # where exit.json will be; so --output_dir stands here and not in a --config file
    [[ ${!i} =~ ^--(output[_-]dir|save[_-]dir|out)(=(.*))?$ ]] || continue
    next=$((i + 1))
    folder=${BASH_REMATCH[3]:-${!next}}
done

status=0 started=$(mktemp)
srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_endpoint="$first:${PORT:-29500}" train.py "$@" || status=$?
if ((status)) && [[ $folder/exit.json -nt $started ]] && grep -q '"code": 75' "$folder/exit.json"; then  # stopped and saved; torchrun hides the code
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
