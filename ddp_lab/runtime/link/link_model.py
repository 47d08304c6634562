"""The time of a collective by its payload: a latency, and a time for each byte (Hockney, "The communication challenge
for MPP", 1994).

    model = LinkModel.fit(payload_bytes=[1e3, 1e4, 1e5, 1e6, 1e7], seconds=[5e-5, 6e-5, 1.5e-4, 1e-3, 9e-3])
    model.seconds(25 * 2**20)

Libraries change their algorithm with the size, so the line holds best where it was fitted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LinkModel:
    """A payload of n bytes (nccl-tests' definition of size) takes `latency_s + n * seconds_per_byte` seconds."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, payload_bytes: ArrayLike) -> Floats:
        return self.latency_s + self.seconds_per_byte * np.asarray(payload_bytes, float)

    @classmethod
    def fit(cls, payload_bytes: ArrayLike, seconds: ArrayLike) -> "LinkModel":
        """The line with the least squares of relative errors, so that small payloads count as much as large ones.

        Both numbers are at least 0.

        Args:
            payload_bytes: At least one. A size may occur several times.
            seconds: The time of each, such as the median over repetitions.

        Raises:
            ValueError: the lengths differ or are 0, a size is below 0, or a time is not above 0.
        """
        from scipy.optimize import nnls  # importing it takes a second, which callers that only evaluate a model save

        sizes, times = np.asarray(payload_bytes, float).ravel(), np.asarray(seconds, float).ravel()
        if len(sizes) != len(times) or not len(sizes):
            raise ValueError(f"{len(sizes)} payloads and {len(times)} times: there must be one of each, at least one")
        if not (np.isfinite(sizes).all() and np.isfinite(times).all() and sizes.min() >= 0 and times.min() > 0):
            raise ValueError("payloads must be at least 0 bytes and times above 0 s, all of them finite")
        scale = max(float(sizes.max()), 1.0)  # the two columns then have the same magnitude
        (latency, slope), _ = nnls(np.column_stack([1 / times, sizes / scale / times]), np.ones_like(times))
        return cls(float(latency), float(slope / scale))
