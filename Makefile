# The commands that people use; `make` lists them.
PYTHON := uv run python

help:
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*##/\t/'

test: ## the tests
	uv run pytest

lint: ## style and types
	uv run ruff check .
	uv run ruff format --check .
	uv run mypy
	$(PYTHON) benchmarks/publish.py --check

sweep: ## train with every strategy on two processes, and on meshes of four, and compare
	./run_experiment_ddp.sh 2
	./run_experiment_shard.sh 2
	./run_experiment_parallel.sh 4

results: ## measure docs/results.md anew, on a quiet machine (20 minutes)
	$(PYTHON) benchmarks/publish.py

.PHONY: help test lint sweep results
