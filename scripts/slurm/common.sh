# What the batch scripts share; they source it from the folder in which sbatch was called, which is the project's.

# Put here what loads your environment, such as: module load cuda; source ~/miniforge3/bin/activate ddp-lab
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Folder of the results and logs. It stays the same when the job is requeued.
results=${RESULTS:-results/$SLURM_JOB_NAME-$SLURM_JOB_ID}
mkdir -p "$results/logs"

ranks_per_node=${SLURM_GPUS_ON_NODE:-${RANKS_PER_NODE:-1}} # without GPUs: sbatch --export=ALL,RANKS_PER_NODE=4
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((15000 + SLURM_JOB_ID % 16000)) # most likely another for another job

# on_tasks COMMAND...: srun COMMAND, and requeue the job if it must end early. When SLURM announces that by SIGUSR1, the
# training saves a checkpoint and ends with exit code 0. The signal is repeated, since a rank that still starts ignores
# it. (torchrun and a rank that starts would be killed by it, so they get it as ignored.)
on_tasks() {
  local training code asked=
  trap 'asked=1; while :; do scancel --signal=USR1 "$SLURM_JOB_ID"; sleep 5; done & asking=$!' USR1
  srun "$@" &
  training=$!
  while wait $training; code=$?; kill -0 $training 2>/dev/null; do :; done
  trap '' USR1
  if [ -n "$asked" ]; then
    kill "$asking"
    if [ $code = 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
  fi
  return $code
}
rank=(sh -c 'trap "" USR1; exec python "$@"' sh)
torchrun=(sh -c 'trap "" USR1; exec torchrun --log-dir "$0/node-$SLURM_NODEID" --tee 3 "$@"' "$results/logs")
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '
