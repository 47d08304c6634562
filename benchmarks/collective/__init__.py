"""Collectives over message size: what is called, the order of measuring, and the table."""
