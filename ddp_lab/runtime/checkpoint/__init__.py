"""Saves a run and resumes it. Every rank writes its part of the state, as ranges of elements of named tensors."""
