"""A real multi-node job on one Linux machine: a network namespace a node, joined by a bridge, each link shaped."""
