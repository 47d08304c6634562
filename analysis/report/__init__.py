"""Pages: the only part of `analysis` that draws."""
