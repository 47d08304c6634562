"""Hand-written expert parallelism: the experts of a mixture are cut over ranks that see different samples, under the
data-parallel and sharded strategies.

Reading order: router, balance, dispatch, experts, parallelize.
"""
