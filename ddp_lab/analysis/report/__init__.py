"""Pages and their figures: the only part of `analysis` that draws."""
