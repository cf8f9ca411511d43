#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=512G
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# Train on the nodes of a Slurm job, from the root of this checkout:
#
#   sbatch --nodes=2 --time=24:00:00 docs/slurm.sh OUT_DIR CONFIG [--key=value ..]
#
# Slurm sends USR1 to this script five minutes before the time limit, and TERM when it preempts the
# job. On either, the script sends TERM to every torchrun, and train.py saves a checkpoint. The job
# queues again, and the same command resumes the run, if OUT_DIR/exit.json has code 75. Without
# that file it also does so unless the command ended with an error, code 1 or 2: a node may be lost.
# After three starts of a submission in a row without a new checkpoint it does not. The script ends
# with that code. OUT_DIR/logs has what each process prints.

out=$1
shift
python=${PYTHON:-.venv/bin/python} # no environment need be active

newest_step() { ls "$out"/*/checkpoints 2>/dev/null | grep -o '[0-9]*$' | sort -n | tail -n 1; }

rm -f "$out/exit.json"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] && rm -f "$out/tries" # a new submission
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # else srun would give all processes one core
step=$(newest_step)
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 40000))

# --kill-on-bad-exit: where one torchrun ends, the others do not wait for it.
# --signals-to-handle: else a USR1 or USR2 that you send to the job would kill torchrun alone.
# --shutdown-timeout: seconds for the last checkpoint; torchrun's own 30 are few for large students.
srun --kill-on-bad-exit=1 "$python" -m torch.distributed.run \
  --nnodes="$SLURM_NNODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" \
  --rdzv_backend=c10d --rdzv_endpoint="$head:$port" \
  --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 --shutdown-timeout=240 \
  --tee=3 --log-dir="$out/logs" \
  train.py "$@" --out_dir="$out" &
srun=$!
trap 'kill -TERM $srun' USR1 TERM
while
  wait $srun # which a signal ends
  ended=$?
  kill -0 $srun 2>/dev/null
do :; done

code=$(sed -n 's/^{"code": \([0-9]*\),.*/\1/p' "$out/exit.json" 2>/dev/null)
if [ -z "$code" ]; then
  code=75
  if [ "$ended" = 1 ] || [ "$ended" = 2 ]; then code=$ended; fi
fi
tries=0
if [ "$(newest_step)" = "$step" ]; then
  tries=$(($(cat "$out/tries" 2>/dev/null || echo 0) + 1))
fi
mkdir -p "$out" && echo "$tries" > "$out/tries"
if [ "$code" = 75 ] && [ "$tries" -lt 3 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
