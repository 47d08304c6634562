"""Half an hour on a rented machine: whether all that this project says holds on its GPUs (docs/gpu.md)."""
