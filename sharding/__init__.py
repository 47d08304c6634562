"""Hand-written sharding (ZeRO), with PyTorch's own beside it. The first strategy arrives with its own file."""

from training.registry import Registry

REGISTRY = Registry({})
CHOICES = REGISTRY.names
load = REGISTRY.load
