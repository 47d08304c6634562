#!/usr/bin/env bash
# Sweep strategies on several meshes, then report:  ./run_experiment_parallel.sh 4 [flags of main_parallel.py]
exec "$(dirname "$0")/scripts/in_environment.sh" sweep parallel "$@"
