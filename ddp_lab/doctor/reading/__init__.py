"""Files read into data. Nothing that is read can run."""
