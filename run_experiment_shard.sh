#!/usr/bin/env bash
# Sweep every sharded strategy, then report:  ./run_experiment_shard.sh 2 [flags of main_shard.py]
exec "$(dirname "$0")/scripts/in_environment.sh" sweep sharding "$@"
