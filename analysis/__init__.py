"""From trace files and run records to tables and pages. Imports neither `training` nor torch: it reads files."""
