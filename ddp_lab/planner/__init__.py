"""What a strategy would cost on a cluster that is not there: its own code, run on tensors without data."""
