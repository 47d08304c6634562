"""From trace files and run records to tables and pages. It reads files, and imports neither torch nor a strategy."""
