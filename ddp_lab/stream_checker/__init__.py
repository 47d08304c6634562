"""Shows without a GPU that a strategy is safe where collectives run on streams of their own (docs/gpu.md)."""
