"""What a strategy says it sends: the unit of its communication formula."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and purpose that one rank issues in one optimizer step.

    Attributes:
        kind: `all_reduce`, `broadcast`, `reduce`, `all_gather`, `reduce_scatter`, `scatter` or `all_to_all`.
        count: Number of calls.
        payload_bytes: Bytes of all `count` calls together. As in nccl-tests, the size of a call is the tensor for
            all-reduce, broadcast and reduce, and the whole (gathered or scattered) tensor for the others.
        group_size: Ranks in the process group.
        purpose: `gradients`, `parameters`, `buffers` or `bookkeeping`.
    """

    kind: str
    count: int
    payload_bytes: int
    group_size: int
    purpose: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends on average: the least that each kind needs (nccl-tests, PERFORMANCE.md)."""
        others, size = self.group_size - 1, self.group_size
        share = {"all_reduce": 2 * others / size, "scatter": others / size**2}.get(self.kind, others / size)
        return self.payload_bytes * share

    def as_dict(self) -> dict[str, str | int | float]:
        return {**asdict(self), "wire_bytes": self.wire_bytes}
