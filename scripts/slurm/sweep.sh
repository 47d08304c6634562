#!/usr/bin/env bash
# Submit a sweep: a job for each choice, and one that reports on all of them.
#   scripts/slurm/sweep.sh ddp|sharding results/my-sweep [flags of the entrypoint]
# CHOICES="zero2 zero3" in front of it: only these.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
if [ $# -lt 2 ]; then
  echo "usage: scripts/slurm/sweep.sh ddp|sharding RESULTS [flags of the entrypoint]" >&2
  exit 2
fi
family=$1
export RESULTS=$2
shift 2
case $family in
  ddp) module=ddp entrypoint=main_ddp.py ;;
  sharding) module=sharding entrypoint=main_shard.py ;;
  *) echo "error: $family: must be ddp or sharding" >&2; exit 2 ;;
esac
choices=${CHOICES:-$(python -c "import $module; print(*$module.REGISTRY.names)")}
count=$(wc -w <<<"$choices")
array=$(sbatch --parsable --array="0-$((count - 1))" scripts/slurm/sweep.sbatch "$entrypoint" "$choices" "$@")
report=$(sbatch --parsable --dependency="afterany:$array" scripts/slurm/report.sbatch "$family")
echo "$count choices: job array $array; report: job $report; results: $RESULTS"
