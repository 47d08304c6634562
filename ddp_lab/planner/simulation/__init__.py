"""Runs a strategy on a pretended rank, and tells how long its step takes and what it holds."""
