"""Hand-written context parallelism: the tokens of each sequence are cut over ranks, under the data-parallel and sharded
strategies.

Reading order: layout, blocks, ring, ulysses.
"""
