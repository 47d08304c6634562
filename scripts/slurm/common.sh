# What the batch scripts share; they source it from the folder in which sbatch was called, which is the project's.

# Put here what loads your environment, such as: module load cuda; source ~/miniforge3/bin/activate ddp-lab
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
# Of this task of an array alone: the number SLURM_JOB_ID of one of them means the whole array.
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
# Folder of the results and logs. It stays the same when the job is requeued.
results=${RESULTS:-results/$SLURM_JOB_NAME-$job}
mkdir -p "$results/logs"

ranks_per_node=${SLURM_GPUS_ON_NODE:-${RANKS_PER_NODE:-1}} # without GPUs: sbatch --export=ALL,RANKS_PER_NODE=4
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((15000 + job % 16000)) # most likely another for another job

# on_tasks COMMAND...: srun COMMAND, and requeue the job if it must end early. When SLURM announces that by SIGUSR1, the
# training saves a checkpoint and ends with exit code 0. A rank that still starts, and torchrun, ignore the signal: so it
# is sent again and again.
on_tasks() {
  local training code announced= repeating=
  trap 'announced=1' USR1 # nothing is started until $! has been read
  srun "$@" &
  training=$!
  trap start_repeating USR1
  if [ -n "$announced" ]; then start_repeating; fi
  while wait $training; code=$?; [ $code = 138 ] && kill -0 $training 2>/dev/null; do :; done # 138: by the signal
  if [ $code = 138 ]; then wait $training; code=$?; fi
  trap '' USR1
  if [ -n "$repeating" ]; then kill "$repeating" 2>/dev/null || true; fi
  if [ $code = 0 ] && is_completed; then return 0; fi
  if { [ -n "$repeating" ] && [ $code = 0 ]; } || is_preempted; then scontrol requeue "$id"; fi
  return $code
}
# Whether the newest record says that the training is done. The signal may come after the last step.
is_completed() {
  local newest
  newest=$(ls -t "$results"/profile/*/*.run.json 2>/dev/null | head -n 1)
  [ -n "$newest" ] && grep -q '"how": "completed"' "$newest"
}
start_repeating() {
  [ -n "$repeating" ] || { repeat_usr1 & repeating=$!; }
}
repeat_usr1() {
  while scancel --signal=USR1 "$id"; do sleep 5; done
}
# Whether a job of higher priority takes this one's place. Unless the cluster is set up to send SIGUSR1 then
# (preempt_send_user_signal), it sends SIGTERM: the training ends at once, and the job would count as failed.
is_preempted() {
  local job preempted
  job=$(scontrol show job --oneliner "$id")
  preempted=$(grep -oP ' PreemptTime=\K[0-9]\S+' <<<"$job") && [[ ! $preempted < $(grep -oP ' StartTime=\K\S+' <<<"$job") ]]
}

rank=(sh -c 'trap "" USR1; exec python "$@"' sh)
torchrun=(sh -c 'trap "" USR1; exec torchrun --log-dir "$0/node-${SLURM_ARRAY_TASK_ID:-$SLURM_NODEID}" --tee 3 "$@"' "$results/logs")
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '
