"""What tensor parallelism sends in a step, by formula (Shoeybi et al., 2019, section 3; Korthikanti et al., 2022).

With T tokens in a micro-batch and hidden states of H features, f and g send T * H elements each: f in backward, g in
forward. So a transformer block sends 4 T H elements in all-reduces. With sequence parallelism each becomes an
all-gather and a reduce-scatter, one in forward and one in backward, and T is padded to a multiple of the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.building import AUTOCAST, DTYPES
from ddp_lab.strategy.communication.collectives import expected_all_gathers, expected_reduce_scatters
from tensor_parallel import cross_entropy
from tensor_parallel.plan import enclosing
from tensor_parallel.region import TensorRanks
from tensor_parallel.sequence import padded


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of products, and as stored, where no lower precision computes."""

    products: int = 4
    stored: int = 4

    @classmethod
    def of(cls, precision: str, param_dtype: str | None) -> "Precision":
        stored = DTYPES[param_dtype or ("fp32" if precision in AUTOCAST else precision)].itemsize
        return cls(min(stored, DTYPES[precision].itemsize), stored)


FP32 = Precision()


@dataclass
class OperatorPlace:
    """f or g somewhere in the model, over hidden states of so many features.

    Attributes:
        has_gradient: Whether backward comes here. It does not where the model's samples enter.
        is_whole: Here all ranks have all tokens, with sequence parallelism too.
    """

    module: str
    features: int
    has_gradient: bool = True
    is_whole: bool = False


class TensorTraffic:
    """The operators of a model, which the parallelizer fills in.

    Attributes:
        ranks: Over which the model is cut.
        precision: Of the stored.
        f, g: Before and after parallel regions.
        sums: Where hidden states are added up in forward alone: embeddings.
        turns: Where sequence parallelism begins and ends.
        losses: Heads, over whose vocabularies a loss is computed.
        parameters: Behind an f of their own: the module of each, its bytes, and the ranks that add them up.
    """

    def __init__(self, ranks: TensorRanks, device: torch.device, precision: Precision) -> None:
        self.ranks, self._device, self.precision = ranks, device, precision
        self.f: list[OperatorPlace] = []
        self.g: list[OperatorPlace] = []
        self.sums: list[OperatorPlace] = []
        self.turns: list[OperatorPlace] = []
        self.losses: list[OperatorPlace] = []
        self.parameters: list[tuple[str, int, int]] = []

    def keep(self, modules: Sequence[str]) -> None:
        """Forget operators outside of these modules: another rank has them."""
        for places in (self.f, self.g, self.sums, self.turns, self.losses):
            places[:] = [place for place in places if enclosing(f"{place.module}.", modules)]
        self.parameters = [entry for entry in self.parameters if enclosing(f"{entry[0]}.", modules)]

    def of_forward(self, passes: int) -> list[Collective]:
        """Of so many more forward passes, without gradients and without sequence parallelism."""
        tokens, products, stored = self.ranks.tokens_in_batch, self.precision.products, self.precision.stored
        sent = [tokens * place.features * products for place in self.g]
        sent += [tokens * place.features * stored for place in self.sums]
        losses = tokens * cross_entropy.NUMBERS * 4
        calls = len(sent) + cross_entropy.CALLS * len(self.losses)
        payload = sum(sent) + losses * len(self.losses)
        return [Collective("all_reduce", passes * calls, passes * payload, self.ranks.size, "activations")]

    def __call__(self, micro_batches: int) -> list[Collective]:
        """Of a step of so many micro-batches of the shape that the latest had, none of which is computed again."""
        tokens, cuts = self.ranks.tokens_in_batch, self.ranks.tokens is not None
        filled, products, stored = padded(tokens, self.ranks.size), self.precision.products, self.precision.stored
        reduced, gathered, scattered = [], [], []
        for place in self.f:
            is_cut = cuts and not place.is_whole
            payload = (filled if is_cut else tokens) * place.features * products
            in_backward = [payload] * place.has_gradient
            if is_cut:
                gathered.append(payload)
                scattered += in_backward
            else:
                reduced += in_backward
        for place in self.g:
            payload = (filled if cuts else tokens) * place.features * products
            if cuts:
                scattered.append(payload)
                gathered.append(payload)
            else:
                reduced.append(payload)
        reduced += [tokens * place.features * stored for place in self.sums]
        gathered += [filled * place.features * stored for place in self.turns if cuts]
        losses = [tokens * cross_entropy.NUMBERS * 4] * len(self.losses)
        group, size = self.ranks.group, self.ranks.size
        traffic = [
            Collective("all_reduce", len(reduced), sum(reduced), size, "activations"),
            Collective("all_reduce", cross_entropy.CALLS * len(losses), sum(losses), size, "activations"),
            replace(expected_all_gathers(gathered, group, self._device), purpose="activations"),
            replace(expected_reduce_scatters(scattered, group, self._device), purpose="activations"),
            *(Collective("all_reduce", 1, payload, ranks, "gradients") for _, payload, ranks in self.parameters),
        ]
        times = micro_batches
        return [replace(c, count=c.count * times, payload_bytes=c.payload_bytes * times) for c in traffic if c.count]
