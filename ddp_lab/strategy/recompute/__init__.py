"""Activation checkpointing: a block's activations are freed in forward, and computed again when backward needs them."""
