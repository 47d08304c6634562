"""A real multi-node job on one Linux machine: one network namespace for each node, joined by a bridge, links shaped."""
