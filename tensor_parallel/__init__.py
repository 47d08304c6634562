"""Hand-written tensor parallelism. Reading order: operators, layers, cross_entropy, plan, parallelize."""
