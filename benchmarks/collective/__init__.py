"""Collectives over message size: what is called, the order of measuring, files, fitted models and the page."""
