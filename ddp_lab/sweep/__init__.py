"""Training with every strategy of a family, in passes."""
