#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# Train on the nodes of a Slurm job, from the root of this checkout:
#
#   sbatch --nodes=2 --time=24:00:00 docs/slurm.sh OUT_DIR CONFIG [--key=value ..]
#
# Slurm sends USR1 to this script five minutes before the time limit, and TERM when it preempts the
# job. On either, the script sends TERM to every torchrun. Then train.py saves a checkpoint, and
# OUT_DIR/exit.json has code 75: the job queues again, and the same command resumes the run. The
# script ends with the code in exit.json. If there is none, the code is 75 after a signal, else 1.

out=$1
shift
rm -f "$out/exit.json"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 40000))

# --kill-on-bad-exit: where one torchrun ends, the others do not wait for it.
# --signals-to-handle: else a USR1 that you send to the job would kill torchrun alone.
# --shutdown-timeout: seconds for the last checkpoint; torchrun's own 30 are few for large students.
srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" --max_restarts=3 \
  --rdzv_backend=c10d --rdzv_endpoint="$head:$port" \
  --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=240 \
  train.py "$@" --out_dir="$out" &
step=$!
missing=1 # the code if there is no exit.json
trap 'missing=75; kill -TERM $step' USR1 TERM
while kill -0 $step 2>/dev/null; do wait $step; done # a signal ends `wait`

code=$(sed -n 's/^{"code": \([0-9]*\),.*/\1/p' "$out/exit.json" 2>/dev/null)
code=${code:-$missing}
if [ "$code" = 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
