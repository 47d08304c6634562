"""Predictions of the planner held against measurements: what `benchmarks/planner.py` prints."""
