"""What tensor parallelism sends in a step, by formula (Shoeybi et al., 2019, section 3; Korthikanti et al., 2022).

With T tokens in a micro-batch and hidden states of H features, f and g send T * H elements each: f in backward, g in
forward. So a transformer block sends 4 T H elements in all-reduces. With sequence parallelism each becomes an
all-gather and a reduce-scatter, one in forward and one in backward, and T is padded to a multiple of the ranks.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sharding.collectives import expected_all_gathers, expected_reduce_scatters
from tensor_parallel import cross_entropy
from tensor_parallel.plan import enclosing
from tensor_parallel.region import Ranks
from tensor_parallel.sequence import padded
from training.communication.traffic import Collective
from training.precision import DTYPES


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of products, and of what is not computed in a lower precision."""

    products: int = 4
    rest: int = 4

    @classmethod
    def of(cls, precision: str, param_dtype: str | None) -> "Precision":
        rest = DTYPES[param_dtype].itemsize if param_dtype else 4
        return cls(min(rest, DTYPES[precision].itemsize), rest)


FP32 = Precision()


class Place(NamedTuple):
    """f or g somewhere in the model, over hidden states of so many features."""

    module: str
    features: int


class Traffic:
    """Filled by the parallelizer: what stands where.

    Attributes:
        precision: Of the activations.
        f, g: In front of and behind parallel regions.
        sums: Features of hidden states that are added up in forward alone: of embeddings.
        turns: Features where sequence parallelism begins and ends.
        losses: Vocabularies over which a loss is computed.
        parameters: Behind an f of their own: bytes of each, and the ranks that add them up.
    """

    def __init__(self, ranks: Ranks, device: torch.device, precision: Precision, recomputed: Collection[str]) -> None:
        self._ranks, self._device, self._recomputed = ranks, device, recomputed
        self.precision = precision
        self.f: list[Place] = []
        self.g: list[Place] = []
        self.sums: list[int] = []
        self.turns: list[int] = []
        self.losses = 0
        self.parameters: list[tuple[int, int]] = []

    def of_step(self, micro_batches: int) -> list[Collective]:
        """Of a step of so many micro-batches of the shape that the latest had."""
        tokens, item, cuts = self._ranks.tokens_in_batch, self.precision.products, self._ranks.tokens is not None
        reduced, gathered, scattered = [], [], []
        for place in [*self.f, *self.g]:
            once_more = enclosing(place.module, self._recomputed) is not None
            if cuts:
                payload = padded(tokens, self._ranks.size) * place.features * item
                gathered += [payload] * (2 if once_more and place in self.f else 1)
                scattered += [payload] * (2 if once_more and place in self.g else 1)
            else:
                reduced += [tokens * place.features * item] * (2 if once_more and place in self.g else 1)
        rest = self.precision.rest
        reduced += [tokens * features * rest for features in self.sums]
        gathered += [padded(tokens, self._ranks.size) * features * rest for features in self.turns if cuts]
        losses = [tokens * cross_entropy.NUMBERS * 4] * self.losses
        group, size = self._ranks.group, self._ranks.size
        one = [
            Collective("all_reduce", len(reduced), sum(reduced), size, "activations"),
            Collective("all_reduce", cross_entropy.CALLS * len(losses), sum(losses), size, "activations"),
            replace(expected_all_gathers(gathered, group, self._device), purpose="activations"),
            replace(expected_reduce_scatters(scattered, group, self._device), purpose="activations"),
            *(Collective("all_reduce", 1, payload, ranks, "gradients") for payload, ranks in self.parameters),
        ]
        times = micro_batches
        return [replace(c, count=c.count * times, payload_bytes=c.payload_bytes * times) for c in one if c.count]
