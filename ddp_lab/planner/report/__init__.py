"""A plan as people read it: table, recommendation, wording."""
