"""Analyses of traces in a folder."""

from ddp_lab.analysis.summary import WindowAnalysis, analyse_window
from ddp_lab.analysis.traces.finding import find_windows


def analysis_of(folder) -> WindowAnalysis:
    """Of the only window there."""
    (window,) = find_windows(folder)
    return analyse_window(window)
