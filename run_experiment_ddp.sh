#!/usr/bin/env bash
# Sweep every replicated strategy, then report:  ./run_experiment_ddp.sh 2 [flags of main_ddp.py]
exec "$(dirname "$0")/scripts/in_environment.sh" sweep ddp "$@"
