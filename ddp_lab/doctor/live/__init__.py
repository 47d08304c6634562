"""`doctor --live`: this machine, and an all-reduce between every pair of ranks on it."""
