"""Training with every strategy of a family, one after the other."""
