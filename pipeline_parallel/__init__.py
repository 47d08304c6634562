"""Hand-written pipeline parallelism, under the data-parallel and sharded strategies.

Reading order: actions, schedules, checks, partition, stage, channels, tied, rank, split_backward, walk, forward_only,
runner, parallelize.
"""
