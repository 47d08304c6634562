"""Sets of time intervals as arrays of shape (n, 2): start and end, in microseconds."""

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def union(intervals: Intervals) -> Intervals:
    """The same moments as disjoint intervals in time order, without empty and negative intervals."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return np.empty((0, 2))
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    furthest = np.maximum.accumulate(intervals[:, 1])
    begins = np.concatenate([[True], intervals[1:, 0] > furthest[:-1]])
    ends = np.concatenate([begins[1:], [True]])
    return np.column_stack([intervals[begins, 0], furthest[ends]])


def length(intervals: Intervals) -> float:
    """Total time covered, each moment counted once."""
    merged = union(intervals)
    return float((merged[:, 1] - merged[:, 0]).sum())


def minus(first: Intervals, second: Intervals) -> Intervals:
    """The moments of `first` that are not in `second`; both disjoint and in order, as `union` makes them."""
    edges = np.unique(np.concatenate([first.ravel(), second.ravel()]))
    begins, ends = edges[:-1], edges[1:]
    remains = within(begins, first) & ~within(begins, second)
    return union(np.column_stack([begins[remains], ends[remains]]))


def within(moments: NDArray[np.float64], intervals: Intervals) -> NDArray[np.bool_]:
    """Which moments are in `intervals`, which are disjoint and in order."""
    return np.searchsorted(intervals[:, 0], moments, "right") > np.searchsorted(intervals[:, 1], moments, "right")


def clip(intervals: Intervals, start: float, end: float) -> Intervals:
    """The part of `intervals` between `start` and `end`."""
    cut = np.clip(intervals, start, end)
    return cut[cut[:, 1] > cut[:, 0]]


def bridge(intervals: Intervals, gap: float) -> Intervals:
    """The union, with gaps shorter than `gap` filled: fewer intervals to draw."""
    merged = union(intervals)
    merged[:, 1] += gap
    merged = union(merged)
    merged[:, 1] -= gap
    return merged
