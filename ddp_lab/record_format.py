"""What those who write run records and those who read them must agree on (`docs/run-record.md`)."""

RECORD_VERSION = 10
"""Version of the format."""
SHARED_GPU = "step times tell about overlap and order, not about as many GPUs as ranks"
"""Behind a record's `gpu_sharing`."""
