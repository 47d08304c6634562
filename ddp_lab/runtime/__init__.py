"""The runtime that every strategy shares. It names no strategy and imports none."""
