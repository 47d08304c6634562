"""Saving a run and going on from it: every rank writes its share of the state as element ranges of named tensors."""
