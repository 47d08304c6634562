"""Hand-written pipeline parallelism, under the data-parallel and sharded strategies.

Reading order: actions, schedules, checks, partition, stage, channels, split_backward, tied, walk, runner, parallelize,
own_loop.
"""
